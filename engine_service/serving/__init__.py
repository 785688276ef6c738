"""The engine as a service on a queue: jobs come in, are run, and their results are written."""
