"""Compiled kernels for CPUs. Optional: without them torch computes the same."""
