"""Tests of Triton kernels. `tests/worker/test_interpreted.py` runs them in Triton's interpreter."""
