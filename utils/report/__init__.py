"""Report: what output folders hold, as a page with charts and as text."""
