"""Benchmarks: one file an op with ``rows(options)``; see README.md in this folder."""
