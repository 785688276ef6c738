-- Jobs that go back to the queue.
-- include: queue clock settings record enqueue fair_share state end_job

-- running -> queued at its old age, so in front; delayed with a delay; cancelled when that was requested; expired after its
-- deadline.
local function give_back(id, engine, delay_ms)
  redis.call('SREM', prefix .. 'leases:' .. engine, id)
  local tenant, priority, serial, cost, cancel, deadline, batch =
    unpack(record(id, 'tenant', 'priority', 'serial', 'cost', 'cancel', 'deadline', 'batch'))
  if not tenant then return end  -- somebody has deleted the record
  redis.call('HDEL', prefix .. 'job:' .. id, 'lease', 'engine', 'base', 'unbegun')
  if cancel then return end_job(id, 'cancelled', 'cancelled') end
  if whole_number(deadline, math.huge) <= now then return end_job(id, 'expired', 'expired') end
  cost = whole_number(cost, 0)
  charge(tenant, 0 - cost)
  count_waiting(tenant, 1, cost)
  if delay_ms > 0 then
    set_state(id, batch, 'running', 'delayed')
    redis.call('ZADD', prefix .. 'delayed', now + delay_ms, id)
  else
    set_state(id, batch, 'running', 'queued')
    add_ready(id, tenant, priority, serial)
  end
end

-- The same for a job whose engine did not fail: the attempt does not count.
local function give_back_uncounted(id, engine, delay_ms)
  give_back(id, engine, delay_ms)
  local attempt = record(id, 'attempt')[1]
  if attempt then redis.call('HSET', prefix .. 'job:' .. id, 'attempt', math.max(0, whole_number(attempt, 1) - 1)) end
end
