"""The embedded sample: a small world, its stories and questions."""
