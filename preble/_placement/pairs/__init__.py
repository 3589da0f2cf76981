"""Requests that two workers serve, one the prompt and one the output: what a decision reads of either, and bookings."""
