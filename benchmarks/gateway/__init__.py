"""What the gateway adds."""
