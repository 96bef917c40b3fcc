"""What a trained network does: evaluate, predict, show its mistakes."""
