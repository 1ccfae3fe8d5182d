"""What can be added to a run: each module is an extension, which run/extensions.py finds by its name."""
