"""How long decisions take, and instructions per operation."""
