"""What is computed: fused layers, compilation, gradients and their exchange."""
