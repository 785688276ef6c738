"""What runs in the process of a rank, besides the worker that computes."""
