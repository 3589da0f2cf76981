"""Naive models to hold the real thing against; they share no code with it."""
