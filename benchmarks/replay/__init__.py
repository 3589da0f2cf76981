"""What a replay says beside what then happened, and how fast it is."""
