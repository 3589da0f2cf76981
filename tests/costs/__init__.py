"""Cost models: numbers, fits, files."""
