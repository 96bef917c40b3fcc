"""Triton kernels of the fused layers for NVIDIA GPUs. utils.network.fused_ops imports them with the first CUDA tensor.

Every image tensor is in channels_last memory: (N, C, H, W) in shape, (N, H, W, C) in memory, so that a batch is a
matrix of N*H*W rows and C columns. Sums are float32, in an order that depends on the shapes alone: two runs agree to
the last bit. Block sizes follow from the shapes by rule, never by trial, because a CUDA graph may be under capture.
"""
