"""Bytes of images and what decoders make of them; the only place that opens images."""
