"""Discovery: rules, sources, and what the gateway makes of them."""
