"""Inference engines behind one small protocol: torch, simulated; SGLang and vLLM join later. Owns nothing itself."""
