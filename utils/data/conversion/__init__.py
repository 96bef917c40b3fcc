"""To shards of another form, and back."""
