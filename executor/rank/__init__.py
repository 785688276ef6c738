"""What runs in a rank's process, beside the worker that computes."""
