-- The fence: each write of an engine carries its lease.
-- include: queue record

-- 'owned', 'ended' (by this lease) or 'stale'; of an owned job also the owner's engine id, and the record's fingerprint.
local function lease_state(id, lease)
  local fields = record(id, 'lease', 'state', 'engine', 'fingerprint')
  if fields[1] ~= lease then return 'stale' end
  if fields[2] == 'running' then return 'owned', fields[3], fields[4] end
  return 'ended'
end

-- Counts a write whose lease is not, or no longer, the job's. Returns 'stale'.
local function refuse_stale_write()
  redis.call('HINCRBY', prefix .. 'counts', 'stale_writes', 1)
  return 'stale'
end
