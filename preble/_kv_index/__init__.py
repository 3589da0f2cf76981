"""What engines report about their caches: KV events decoded, blocks by hash, and how accurate the estimates are."""
