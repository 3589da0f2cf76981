"""Pairs of workers: their price, their bookings."""
