"""Batches of a run: the order of the images, and one file a loader."""
