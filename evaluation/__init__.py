"""Evaluation during a run and of a saved model."""
