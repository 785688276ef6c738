"""The queue in Redis, and each job's record and result: keys, scripts, readers, writer."""
