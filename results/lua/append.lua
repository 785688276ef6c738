-- Keeps output of a running job, and shows an event of it: running -> running. Safe to repeat.
-- KEYS  1 the queue's prefix
-- ARGV  1 job id, 2 lease, 3 offset of the first token, 4 tokens (4 bytes each), 5 fingerprint of the engine's model,
--       then, when there is an event: 6 its offset, 7 its number of tokens, 8 its token ids (JSON), 9 its text
-- Returns "ok" or "stale" (the lease is not, or no longer, the job's; or the server has lost earlier output)

go_on_when_out_of_memory()
local id, lease = ARGV[1], ARGV[2]
if standing(id, lease) ~= 'owned' then return refuse_stale_write() end
local num_kept = extend_checkpoint(id, tonumber(ARGV[3]), ARGV[4])
if not num_kept then return refuse_stale_write() end
redis.call('HSET', prefix .. 'job:' .. id, 'fingerprint', ARGV[5])
if not ARGV[6] then return 'ok' end
if ARGV[6] + ARGV[7] > num_kept then
  return redis.error_reply('ERR the event shows tokens that the checkpoint does not hold')
end
if not publish(id, record(id, 'published')[1], tonumber(ARGV[6]), ARGV[7], ARGV[8], ARGV[9]) then return refuse_stale_write() end
bound_stream(id)
return 'ok'
