"""What a checkpoint keeps, and the files of it."""
