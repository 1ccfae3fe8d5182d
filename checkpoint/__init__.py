"""Checkpoints on disk, and the file formats of Hugging Face, Meta and PEFT."""
