"""Requests before servers that run already: forwarded as they came, read only as far as routing needs."""
