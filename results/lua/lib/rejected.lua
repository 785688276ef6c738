-- The stream of rejected inbox entries, at most 1,000 x (128 + 4,096 + 1,024) bytes.
-- include: queue

local MAX_REJECTED = 1000
local REJECTED_TTL_MS = 7 * 86400000  -- from the last entry on
local function add_rejected(id, raw, error)
  local key = prefix .. 'rejected'
  redis.call('XADD', key, 'MAXLEN', MAX_REJECTED, '*', 'id', string.sub(id, 1, 128), 'raw', string.sub(raw, 1, 4096),
    'error', string.sub(error, 1, 1024))
  redis.call('PEXPIRE', key, REJECTED_TTL_MS)
  redis.call('HINCRBY', prefix .. 'counts', 'rejected', 1)
end
