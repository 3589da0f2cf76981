"""Tests of who may come in: pages, keys, proxies."""
