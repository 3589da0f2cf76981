"""Servers that are found while the gateway runs: in Kubernetes, by DNS, in a file."""
