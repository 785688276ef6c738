-- Requests that engines forget their prefix caches: writes a number that grows into their heartbeats, and signals them to send the
-- next one at once. No transition.
-- ARGV  1 engine id, or "" for every engine of the queue
-- Returns the ids of the engines that were signalled: those with a heartbeat
-- include: queue serial engines

allow_writes_without_memory()
return request_of_engines(ARGV[1], 'reset_cache', next_serial())
