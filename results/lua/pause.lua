-- Pauses or resumes a queue. While it is paused, claims take nothing; running jobs continue and new jobs are accepted. No
-- transition.
-- ARGV  1 "1" to pause, "" to resume
-- Returns "ok"
-- include: queue work

allow_writes_without_memory()
if ARGV[1] == '1' then
  redis.call('HSET', prefix .. 'settings', 'paused', '1')
else
  redis.call('HDEL', prefix .. 'settings', 'paused')
  wake(num_ready())
end
return 'ok'
