"""train and val of a run: read, held out, looked at."""
