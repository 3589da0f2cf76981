"""The worker process and what its options ask for."""
