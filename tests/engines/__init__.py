"""Engines inside a worker: torch, simulated, those that run by themselves."""
