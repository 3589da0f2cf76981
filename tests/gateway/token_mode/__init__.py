"""The gateway before workers of ours: what becomes of a request's fields on the way to their engines."""
