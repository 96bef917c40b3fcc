"""Runs that are sent to experiment trackers."""
