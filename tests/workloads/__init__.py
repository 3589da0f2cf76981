"""Prompts, traces and arrivals."""
