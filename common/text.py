"""Numbers and text for people."""


def duration(seconds: float) -> str:
    """5:30, or 2:05:30 from an hour on."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
