"""Text from a model: sampling, batches of requests, streams of text."""
