"""Processes: group, collectives, who is alive, how a process ends."""
