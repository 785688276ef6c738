"""Tests of Triton kernels. `tests/worker/test_triton.py` runs them in Triton's interpreter."""
