"""Serves a queue with an engine: claims jobs, runs them, and writes their results."""
