"""Public layouts of drafter checkpoints, read and written."""
