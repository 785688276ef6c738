-- Requests that engines sleep or wake up: writes the level into their heartbeats, and signals them to send the next one at
-- once. No transition by itself; an engine that falls asleep releases its jobs, and claims nothing while it sleeps.
-- KEYS  1 the queue's prefix
-- ARGV  1 "1" to sleep with the weights in host memory, "2" without them, "0" to wake up
--       2 engine id, or "" for every engine of the queue
-- Returns the ids of the engines that were signalled: those with a heartbeat
-- include: queue signals

if not ({['0'] = true, ['1'] = true, ['2'] = true})[ARGV[1]] then
  return redis.error_reply('ERR the level of sleep must be 0, 1 or 2')
end
allow_writes_without_memory()
local signalled = {}
for _, engine in ipairs(redis.call('ZRANGE', prefix .. 'engines', 0, -1)) do
  local heartbeat = prefix .. 'engine:' .. engine
  if (ARGV[2] == '' or ARGV[2] == engine) and redis.call('EXISTS', heartbeat) == 1 then
    redis.call('HSET', heartbeat, 'sleep', ARGV[1])
    signal(engine, 'beat', 'now')
    signalled[#signalled + 1] = engine
  end
end
return signalled
