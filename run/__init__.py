"""A run from start to end: how it is built, its folder, its log and its checkpoints."""
