"""A scheduler as bytes."""
