"""Benchmarks of Millrace. `make bench` runs all parts and writes one JSON file."""
