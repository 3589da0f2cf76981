"""`preble demo`."""
