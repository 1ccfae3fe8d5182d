"""What a run's folder tells: its curves, chronicle, alarms and comparisons, as one page."""
