"""`preble serve`: API, text, page, metrics, processes."""
