-- Gives a job back with its output so far: running -> queued, or delayed; cancelled when that was asked for,
-- expired when its deadline has passed. The attempt does not count.
-- KEYS  1 the queue's prefix
-- ARGV  1 job id, 2 lease, 3 offset of the first token, 4 tokens (4 bytes each), 5 fingerprint of the engine's model,
--       6 how long to wait in ms, or "0"
-- Returns "ok" or "stale" (the lease is not, or no longer, the job's; a repeated release gets that too)

go_on_when_out_of_memory()
local id, lease = ARGV[1], ARGV[2]
local stand, engine = standing(id, lease)
if stand ~= 'owned' then return refuse_stale_write() end
if extend_checkpoint(id, tonumber(ARGV[3]), ARGV[4]) and #ARGV[4] > 0 then
  redis.call('HSET', prefix .. 'job:' .. id, 'fingerprint', ARGV[5])
end
give_back_unharmed(id, engine, tonumber(ARGV[6]))
wake(1)
return 'ok'
