"""`preble profile`."""
