"""Requests before servers that run already."""
