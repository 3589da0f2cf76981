"""Preble's router beside Ray Serve's own."""
