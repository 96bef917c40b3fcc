"""What the user left open, chosen."""
