"""What a run will do, decided before it starts. `make.py` is the table of contents; it uses, in this order:

- `layers` and `names`: the settings of each source, and what to do about an unknown name or value
- `starts`: where the run starts, and the model that it starts from; `identity` says what a model or data is
- `resume_rules`: what a continued run keeps from its record, and what has changed since
- `derived`: values of settings that nobody set
- `messages`: what the plan prints

`command_line` has --help, and ends the process with an error.
"""
