-- Marks a job as read live for a while, and signals its engine when that is new. No transition.
-- ARGV  1 job id, 2 for how long in ms
-- Returns nil (unknown) or an array: state, tokens trimmed from the stream, id of the last trimmed entry or "", 0 when the
--       job has ended and its stream has expired, else 1
-- include: queue settings record signals

allow_writes_without_memory()
local id = ARGV[1]
local fields = record(id, 'state', 'ended', 'engine', 'trimmed', 'trimmed_id')
if not fields[1] then return false end
if not fields[2] then
  local is_new = not is_watched(id)
  redis.call('SET', prefix .. 'watched:' .. id, '1', 'PX', ARGV[2])
  if is_new and fields[3] then signal(fields[3], 'watch', id) end
end
local has_expired = fields[2] and redis.call('EXISTS', prefix .. 'result:' .. id) == 0
return {fields[1], whole_number(fields[4], 0), fields[5] or '', has_expired and 0 or 1}
