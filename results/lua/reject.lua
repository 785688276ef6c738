-- Rejects an inbox entry: nothing -> failed under its id; without an id, or where the id belongs to another job, the entry goes
-- to `rejected`. The first engine that calls it gets the entry.
-- ARGV  1 id of the inbox entry, 2 job id or "", 3 digest of the raw entry, 4 the raw entry (its first 4,096 bytes are
--       enough), 5 the error (JSON)
-- Returns "failed", "exists" (the same entry was refused before), "rejected" or "taken" (another engine had the entry)
-- include: queue clock serial end_job

allow_writes_without_memory()
local id, digest, raw, error = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
if redis.call('XDEL', prefix .. 'inbox', ARGV[1]) == 0 then return 'taken' end
local known = id ~= '' and redis.call('HGET', prefix .. 'job:' .. id, 'digest')
if known == digest then return 'exists' end
if id == '' or known then  -- at most 1,000 x (128 + 4,096 + 1,024) bytes, for 7 days from the last entry on
  local key = prefix .. 'rejected'
  redis.call('XADD', key, 'MAXLEN', 1000, '*', 'id', string.sub(id, 1, 128), 'raw', string.sub(raw, 1, 4096),
    'error', string.sub(error, 1, 1024))
  redis.call('PEXPIRE', key, 7 * 86400000)
  redis.call('HINCRBY', prefix .. 'counts', 'rejected', 1)
  return 'rejected'
end
redis.call('HSET', prefix .. 'job:' .. id, 'v', PROTOCOL, 'digest', digest, 'serial', next_serial(), 'created', now)
end_job(id, 'failed', 'error', nil, 'error', error)
return 'failed'
