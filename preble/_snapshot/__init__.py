"""All of a scheduler as bytes, and back: the compiled half. `preble.scheduling.snapshot` conducts it."""
