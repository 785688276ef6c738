-- Refuses an inbox entry: nothing -> failed under the id that it names, or a line in `rejected` when it names none that is
-- free. Only the first engine to come gets the entry.
-- KEYS  1 the queue's prefix
-- ARGV  1 id of the inbox entry, 2 job id or "", 3 digest of the raw entry, 4 the raw entry, cut to a sane length,
--       5 the error (JSON)
-- Returns "failed", "exists" (the same entry was refused before), "rejected" or "taken" (another engine had the entry)

go_on_when_out_of_memory()
local id, digest, raw, error = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
if redis.call('XDEL', prefix .. 'inbox', ARGV[1]) == 0 then return 'taken' end
local known = id ~= '' and redis.call('HGET', prefix .. 'job:' .. id, 'digest')
if known == digest then return 'exists' end
if id == '' or known then
  add_rejected(id, raw, error)
  return 'rejected'
end
create_record(id, digest, next_serial())
end_job(id, 'failed', 'error', nil, 'error', error)
return 'failed'
