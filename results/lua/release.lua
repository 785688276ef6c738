-- Gives a job back with its output so far: running -> queued, or delayed; cancelled when that was requested; expired after its
-- deadline. The attempt does not count.
-- ARGV  1 job id, 2 lease, 3 fingerprint of the engine's model, 4 the delay in ms, or "0", then for each candidate with new
--       output 4 values: "" for the only candidate of a job, ":<index>" for one of several, offset of the first token,
--       tokens (4 bytes each), and their log-probabilities (a line of JSON each) or "", which the last one may leave out
-- Returns "ok" or "stale" (the lease is not, or no longer, the job's; a repeated release gets that too)
-- include: queue lease work output give_back

allow_writes_without_memory()
local id, lease = ARGV[1], ARGV[2]
local state, engine = lease_state(id, lease)
if state ~= 'owned' then return refuse_stale_write() end
for i = 5, #ARGV, 4 do
  if extend_checkpoint(id, ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2], ARGV[i + 3]) and #ARGV[i + 2] > 0 then
    redis.call('HSET', prefix .. 'job:' .. id, 'fingerprint', ARGV[3])
  end
end
give_back_uncounted(id, engine, tonumber(ARGV[4]))
wake(1)
return 'ok'
