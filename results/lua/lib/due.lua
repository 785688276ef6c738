-- Jobs whose time has come: delays and deadlines, at most 256 of each in one call.
-- include: queue clock

-- The milliseconds until the first job is due, 0 where this call has not handled all; nil where there is no such job.
local function next_due_ms()
  local first
  for _, name in ipairs({'delayed', 'deadlines'}) do
    local at = tonumber(redis.call('ZRANGE', prefix .. name, 0, 0, 'WITHSCORES')[2])
    if at then first = math.min(first or at, at) end
  end
  return first and math.max(0, first - now)
end

-- The first jobs of a sorted set whose time has passed.
local function ids_due(key)
  return redis.call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, 256)
end

-- delayed -> queued.
local function promote_due()
  local key = prefix .. 'delayed'
  local ids = ids_due(key)
  if #ids == 0 then return end
  -- include: record enqueue state
  for _, id in ipairs(ids) do
    redis.call('ZREM', key, id)
    local tenant, priority, serial, batch = unpack(record(id, 'tenant', 'priority', 'serial', 'batch'))
    if tenant then
      set_state(id, batch, 'delayed', 'queued')
      add_ready(id, tenant, priority, serial)
    end
  end
end

-- queued, delayed -> expired. The engine of a running job gets a signal, and ends the job.
local function expire_due()
  local key = prefix .. 'deadlines'
  local ids = ids_due(key)
  if #ids == 0 then return end
  -- include: record signals ready dequeue end_job
  for _, id in ipairs(ids) do
    redis.call('ZREM', key, id)
    local state, tenant, serial, engine = unpack(record(id, 'state', 'tenant', 'serial', 'engine'))
    if state == 'running' and engine then
      redis.call('HSET', prefix .. 'job:' .. id, 'expire', '1')
      signal(engine, 'expire', id)
    elseif state == 'queued' and tenant then
      remove_ready(tenant, ready_member(id, serial))
      end_job(id, 'expired', 'expired')
    elseif state == 'delayed' and tenant then
      redis.call('ZREM', prefix .. 'delayed', id)
      end_job(id, 'expired', 'expired')
    end
  end
end
