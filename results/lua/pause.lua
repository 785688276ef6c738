-- Stops a queue from handing out jobs, or lets it go on. What runs goes on, and jobs still come in. No transition.
-- KEYS  1 the queue's prefix
-- ARGV  1 "1" to pause, "" to resume
-- Returns "ok"

go_on_when_out_of_memory()
if ARGV[1] == '1' then
  redis.call('HSET', prefix .. 'settings', 'paused', '1')
else
  redis.call('HDEL', prefix .. 'settings', 'paused')
  wake(num_ready())
end
return 'ok'
