"""The optimizer, its step, and the learning rate."""
