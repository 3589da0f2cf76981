"""Placement rules and what all policies share."""
