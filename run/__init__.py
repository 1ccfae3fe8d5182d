"""A run from its start to its end: what it is built of, its folder, its log and its checkpoints."""
