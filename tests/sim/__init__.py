"""The discrete-event simulation."""
