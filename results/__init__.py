"""The job's record in Redis, from its birth to its end: keys, scripts, states, results, readers, writer."""
