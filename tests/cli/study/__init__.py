"""`preble study`."""
