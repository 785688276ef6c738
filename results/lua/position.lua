-- Estimates when a job begins. No transition.
-- ARGV  1 job id
-- Returns nil (unknown) or an array: state; jobs likely to begin before it, -1 unless it is queued; milliseconds until it
--       begins at the pace of the last completions while jobs waited, -1 where that is not known; 1 while the job waits for
--       an engine with the model that began it, or 0
-- include: queue clock record work estimates

local id = ARGV[1]
local state, tenant, serial, created, mismatch = unpack(record(id, 'state', 'tenant', 'serial', 'created', 'mismatch'))
if not state then return false end
if mismatch and (state == 'queued' or state == 'delayed') then return {state, -1, -1, 1} end
if state == 'delayed' then
  local due = redis.call('ZSCORE', prefix .. 'delayed', id)
  return {state, -1, due and math.max(0, due - now) or -1, 0}
end
if state ~= 'queued' then return {state, -1, -1, 0} end
local num_ahead = count_ahead(id, tenant, serial)
local pace = jobs_per_ms(waiting_since(tenant, created))
return {state, num_ahead, pace and not is_paused() and math.ceil((num_ahead + 1) / pace) or -1, 0}
