"""Tests of the fits of costs."""
