"""What changes training images: crops, policies, color jitter, the user's own code."""
