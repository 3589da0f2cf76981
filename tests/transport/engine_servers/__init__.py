"""Running SGLang and vLLM servers: their HTTP and their KV events."""
