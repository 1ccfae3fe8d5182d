"""The embedded sample: story templates, stories and questions."""
