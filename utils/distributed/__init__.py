"""Processes: group, collectives, which ranks work, how a process ends."""
