-- Gives a job back with its output so far: running -> queued, or delayed; cancelled when that was requested; expired after its
-- deadline. The attempt does not count.
-- KEYS  1 the queue's prefix
-- ARGV  1 job id, 2 lease, 3 offset of the first token, 4 tokens (4 bytes each), 5 fingerprint of the engine's model,
--       6 the delay in ms, or "0"
-- Returns "ok" or "stale" (the lease is not, or no longer, the job's; a repeated release gets that too)
-- include: queue lease work output give_back

allow_writes_without_memory()
local id, lease = ARGV[1], ARGV[2]
local state, engine = lease_state(id, lease)
if state ~= 'owned' then return refuse_stale_write() end
if extend_checkpoint(id, tonumber(ARGV[3]), ARGV[4]) and #ARGV[4] > 0 then
  redis.call('HSET', prefix .. 'job:' .. id, 'fingerprint', ARGV[5])
end
give_back_uncounted(id, engine, tonumber(ARGV[6]))
wake(1)
return 'ok'
