"""Tests of `benchmarks/scale`."""
