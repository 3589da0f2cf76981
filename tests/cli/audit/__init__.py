"""`preble audit`."""
