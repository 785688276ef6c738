-- Cancels a job: queued, delayed -> cancelled at once. A running job gets a flag, and its engine a signal; the engine ends the
-- job. A job that has ended stays as it is.
-- ARGV  1 job id
-- Returns nil (unknown), "cancelled", "cancelling", or the state that the job had ended in before
-- include: queue record signals ready dequeue end_job

allow_writes_without_memory()
local id = ARGV[1]
local fields = record(id, 'state', 'tenant', 'serial', 'engine')
local state = fields[1]
if not state then return false end
if state == 'queued' then
  remove_ready(fields[2], ready_member(id, fields[3]))
elseif state == 'delayed' then
  redis.call('ZREM', prefix .. 'delayed', id)
elseif state == 'running' then
  redis.call('HSET', prefix .. 'job:' .. id, 'cancel', '1')
  signal(fields[4], 'cancel', id)
  return 'cancelling'
else
  return state
end
end_job(id, 'cancelled', 'cancelled')
return 'cancelled'
