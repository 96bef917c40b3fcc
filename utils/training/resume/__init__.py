"""What a launch takes over from a checkpoint, and whether it may."""
