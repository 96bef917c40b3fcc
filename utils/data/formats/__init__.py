"""Formats of data sets, one module each: it lists the images and says where the bytes of each are."""
