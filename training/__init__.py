"""A run: its set-up, its state, what happens beside the steps."""
