-- Estimates of when jobs begin.
-- include: queue clock settings record ready fair_share dequeue

-- Since when jobs of a tenant have waited: `created_ms`, or the creation of the job that begins next.
local function waiting_since(tenant, created_ms)
  local member = redis.call('ZRANGE', prefix .. 'ready:' .. tenant, 0, 0)[1]
  local first = member and record(id_of_member(member), 'created')[1]
  return math.min(whole_number(created_ms, now), whole_number(first, now))
end

-- Throughput: jobs completed in a millisecond, over the last completions since a time. nil where there were none lately. `since`
-- is when jobs began to wait: before it the engines may have been idle. There is a limit of pages, since many jobs that never
-- began may have ended in between.
local MAX_COMPLETIONS, MAX_PAGES = 500, 10
local function jobs_per_ms(since)
  local oldest, latest = math.max(now - 600000, since), '+'
  local num_completed, earliest = 0, nil
  for _ = 1, MAX_PAGES do
    local entries = redis.call('XREVRANGE', prefix .. 'done', latest, oldest, 'COUNT', MAX_COMPLETIONS)
    for _, entry in ipairs(entries) do
      local state = entry[2][4]
      if num_completed < MAX_COMPLETIONS and (state == 'finished' or state == 'failed') then
        num_completed, earliest = num_completed + 1, entry
      end
    end
    if #entries < MAX_COMPLETIONS or num_completed == MAX_COMPLETIONS then break end
    latest = '(' .. entries[#entries][1]
  end
  if not earliest then return nil end
  local span = now - tonumber(string.match(earliest[1], '^%d+'))
  local times = record(earliest[2][2], 'started', 'ended')  -- false where the record has expired
  local started, ended = whole_number(times[1], nil), whole_number(times[2], nil)
  -- An engine may end many jobs in one moment: where there are no others, that took as long as the earliest one ran.
  if num_completed < MAX_COMPLETIONS and started and ended then span = math.max(span, ended - started) end
  return num_completed / math.max(1, span)
end

-- A tenant's queue: its ready jobs, their average cost, its virtual time and its weight.
local function queue_of(tenant, time)
  local waiting = redis.call('HMGET', prefix .. 'waiting', tenant .. ':jobs', tenant .. ':tokens')
  local num_jobs, num_tokens = tonumber(waiting[1] or 0), tonumber(waiting[2] or 0)
  return {num_jobs = redis.call('ZCARD', prefix .. 'ready:' .. tenant), time = tonumber(time),
    job_cost = num_jobs > 0 and math.max(1, num_tokens / num_jobs) or 1, weight = weight_of(tenant)}
end

-- How many jobs are likely to begin before a queued one. Fair share serves the other tenants until their virtual times reach
-- the one that this tenant will have at the job's turn.
local MAX_TENANTS = 64
local function count_ahead(id, tenant, serial)
  local rank = redis.call('ZRANK', prefix .. 'ready:' .. tenant, ready_member(id, serial)) or 0
  local own = queue_of(tenant, redis.call('ZSCORE', prefix .. 'tenants', tenant) or 0)
  local turn = own.time + rank * own.job_cost / own.weight
  local tenants = redis.call('ZRANGE', prefix .. 'tenants', 0, MAX_TENANTS - 1, 'WITHSCORES')
  local num_ahead = rank
  for i = 1, #tenants, 2 do
    if tenants[i] ~= tenant then
      local other = queue_of(tenants[i], tenants[i + 1])
      local num_served = math.ceil(math.max(0, turn - other.time) * other.weight / other.job_cost)
      num_ahead = num_ahead + math.min(other.num_jobs, num_served)
    end
  end
  return num_ahead
end
