"""Has moved: python scripts/dev/plan_scaling.py"""
raise SystemExit(__doc__)
