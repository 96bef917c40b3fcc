"""What all of `utils.data` speaks of: images, manifests, batches."""
