"""Measuring loaders and the training step, and what follows from it."""
