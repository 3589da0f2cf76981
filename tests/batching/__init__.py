"""What the local scheduler conducts."""
