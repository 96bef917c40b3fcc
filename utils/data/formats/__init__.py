"""Formats of data sets, one module each: it lists the images and locates the bytes of each."""
