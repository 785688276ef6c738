"""The engine: intake, scheduling, text and results. `millrace.LLM` is its offline API."""
