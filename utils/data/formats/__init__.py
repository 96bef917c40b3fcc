"""The forms in which data sets are held, a file each."""
