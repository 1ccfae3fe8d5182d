"""Has moved: ./paddock report RUN --figure FILE.png"""
raise SystemExit(__doc__)
