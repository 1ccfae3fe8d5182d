"""Has moved: ./paddock report RUN --plot FILE.png"""
raise SystemExit(__doc__)
