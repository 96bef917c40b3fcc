"""The run: state, checkpoint, resume, metrics, evaluation, output folder."""
