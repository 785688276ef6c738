"""C for CPUs, and the row operations of GPUs. Both are optional: without them torch computes the same."""
