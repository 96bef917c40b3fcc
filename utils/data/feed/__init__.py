"""Batches for a training loop of your own."""
