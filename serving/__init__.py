"""A model behind a page and an OpenAI-compatible API."""
