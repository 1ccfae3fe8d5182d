"""From text to token shards: sources, chats, filters, preparation, mixtures."""
