"""Measurements of one GPU: `python -m benchmarks.gpu --help`."""
