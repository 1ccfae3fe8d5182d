"""From text to rows: sources, chats, tokens, shards, packing."""
