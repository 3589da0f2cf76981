"""SGLang and vLLM servers that run already: their HTTP, their KV events, what they report about themselves."""
