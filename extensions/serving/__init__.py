"""Serves models through a chat page and an OpenAI-compatible API."""
