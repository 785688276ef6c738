-- Reads the part of the output that was trimmed from a job's stream. No transition.
-- KEYS  1 the queue's prefix
-- ARGV  1 job id
-- Returns an array: the text, the tokens (4 bytes each), id of the last trimmed entry
-- include: queue record

local id = ARGV[1]
local f = record(id, 'trimmed', 'trimmed_id')
if not f[1] then return {'', '', ''} end
return {redis.call('GET', prefix .. 'text:' .. id) or '',
  redis.call('GETRANGE', prefix .. 'tokens:' .. id, 0, f[1] * 4 - 1), f[2]}
