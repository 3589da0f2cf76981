"""Real engines under load."""
