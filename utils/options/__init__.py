"""What the user may say: flags, configuration, recipes, limits, and their checks."""
