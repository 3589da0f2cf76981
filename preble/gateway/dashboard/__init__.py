"""What the live page shows: its state, its events, its history, and the page itself."""
