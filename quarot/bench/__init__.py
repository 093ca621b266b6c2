"""Whole models and single blocks, timed against transformers: what ``quarot bench`` and ``benchmarks/`` share."""
