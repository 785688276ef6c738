-- Requests that engines sleep or wake up: writes the level into their heartbeats, and signals them to send the next one at
-- once. No transition by itself; an engine that falls asleep releases its jobs, and claims nothing while it sleeps.
-- ARGV  1 "1" to sleep with the weights in host memory, "2" without them, "0" to wake up
--       2 engine id, or "" for every engine of the queue
-- Returns the ids of the engines that were signalled: those with a heartbeat
-- include: queue engines

if not ({['0'] = true, ['1'] = true, ['2'] = true})[ARGV[1]] then
  return redis.error_reply('ERR the level of sleep must be 0, 1 or 2')
end
allow_writes_without_memory()
return request_of_engines(ARGV[2], 'sleep', ARGV[1])
