"""What a network is trained on: manifests, order, reading, decoding, loaders."""
