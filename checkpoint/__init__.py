"""Checkpoints on disk, and the formats of Hugging Face, Meta and PEFT."""
