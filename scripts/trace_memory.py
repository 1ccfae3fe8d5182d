"""Has moved: python scripts/dev/trace_memory.py"""
raise SystemExit(__doc__)
