"""A step of a run taken again and examined, row by row."""
