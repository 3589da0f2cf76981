"""KV events into the index of blocks."""
