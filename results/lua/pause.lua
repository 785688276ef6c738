-- Stops a queue from handing out jobs, or lets it go on. What runs goes on, and jobs still come in. No transition.
-- KEYS  1 the queue's prefix
-- ARGV  1 "1" to pause, "" to resume
-- Returns 1 when that is news, else 0

go_on_when_out_of_memory()
local was_paused = is_paused()
if ARGV[1] == '1' then
  redis.call('HSET', prefix .. 'settings', 'paused', '1')
  return was_paused and 0 or 1
end
redis.call('HDEL', prefix .. 'settings', 'paused')
wake(num_ready())
return was_paused and 1 or 0
