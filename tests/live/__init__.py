"""Real engines; see `make test-live`."""
