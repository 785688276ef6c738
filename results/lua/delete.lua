-- Deletes a job that has ended: its request, its output and its record, as their TTLs would later. What was counted stays
-- counted, also in its batch. Any other job stays. After that a job of the same id is a new one.
-- ARGV  1 job id
-- Returns nil (unknown), "deleted", or the state of a job that has not ended
-- include: queue record candidates

local IS_TERMINAL = {finished = true, failed = true, cancelled = true, expired = true}

allow_writes_without_memory()
local id = ARGV[1]
local fields = record(id, 'state', 'n')
local state = fields[1]
if not state then return false end
if not IS_TERMINAL[state] then return state end
redis.call('DEL', prefix .. 'job:' .. id, prefix .. 'body:' .. id, prefix .. 'meta:' .. id, prefix .. 'result:' .. id,
  prefix .. 'watched:' .. id)
for _, suffix in ipairs(suffixes(fields[2])) do
  local name = id .. suffix
  redis.call('DEL', prefix .. 'tokens:' .. name, prefix .. 'logprobs:' .. name, prefix .. 'text:' .. name,
    prefix .. 'chat:' .. name)
end
redis.call('ZREM', prefix .. 'dead', id)
return 'deleted'
