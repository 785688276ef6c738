-- Estimates when a job begins. No transition.
-- KEYS  1 the queue's prefix
-- ARGV  1 job id
-- Returns nil (unknown) or an array: state; jobs likely to begin before it, -1 unless it is queued; milliseconds until it
--       begins at the pace of the last completions, -1 where that is not known

local MAX_TENANTS = 64  -- that the estimate looks at

-- A tenant's line: its jobs, what one of them costs on average, its virtual time and its weight.
local function line_of(tenant, time)
  local waiting = redis.call('HMGET', prefix .. 'waiting', tenant .. ':jobs', tenant .. ':tokens')
  local num_jobs, num_tokens = tonumber(waiting[1] or 0), tonumber(waiting[2] or 0)
  return {num_jobs = redis.call('ZCARD', prefix .. 'ready:' .. tenant), time = tonumber(time),
    job_cost = num_jobs > 0 and math.max(1, num_tokens / num_jobs) or 1, weight = weight_of(tenant)}
end

-- Fair share serves the others until they are where this tenant will be when the job's turn comes.
local function count_ahead(tenant, rank)
  local own = line_of(tenant, redis.call('ZSCORE', prefix .. 'tenants', tenant) or 0)
  local turn = own.time + rank * own.job_cost / own.weight
  local tenants = redis.call('ZRANGE', prefix .. 'tenants', 0, MAX_TENANTS - 1, 'WITHSCORES')
  local num_ahead = rank
  for i = 1, #tenants, 2 do
    if tenants[i] ~= tenant then
      local other = line_of(tenants[i], tenants[i + 1])
      local num_served = math.ceil(math.max(0, turn - other.time) * other.weight / other.job_cost)
      num_ahead = num_ahead + math.min(other.num_jobs, num_served)
    end
  end
  return num_ahead
end

local id = ARGV[1]
local state, tenant, serial = unpack(record(id, 'state', 'tenant', 'serial'))
if not state then return false end
if state == 'delayed' then
  local due = redis.call('ZSCORE', prefix .. 'delayed', id)
  return {state, -1, due and math.max(0, due - now) or -1}
end
if state ~= 'queued' then return {state, -1, -1} end
local num_ahead = count_ahead(tenant, redis.call('ZRANK', prefix .. 'ready:' .. tenant, ready_member(id, serial)) or 0)
local pace = jobs_per_ms()
return {state, num_ahead, pace and not is_paused() and math.ceil(num_ahead / pace) or -1}
