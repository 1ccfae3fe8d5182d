"""Has moved: python scripts/report.py RUN --plot FILE.png"""
raise SystemExit(__doc__)
