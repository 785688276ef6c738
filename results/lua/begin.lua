-- Records that an engine begins to compute a job that runs alone: running -> running. Until then the engine's death does not
-- count against the job (see recover). Safe to repeat.
-- ARGV  1 job id, 2 lease
-- Returns "ok" or "stale" (the lease is not, or no longer, the job's)
-- include: queue lease

allow_writes_without_memory()
local id, lease = ARGV[1], ARGV[2]
if lease_state(id, lease) ~= 'owned' then return refuse_stale_write() end
redis.call('HDEL', prefix .. 'job:' .. id, 'unbegun')
return 'ok'
