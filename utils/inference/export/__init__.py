"""Export: a checkpoint as files that other programs read."""
