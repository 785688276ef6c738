-- Jobs that leave the ready sets.
-- include: queue

local function id_of_member(member)
  return string.sub(member, 27)
end

-- Counts ready jobs of a tenant that the caller has removed, and returns the number of ready jobs of all tenants. `has_more`:
-- whether the tenant has more of them; nil where the caller does not know. Without any, its virtual time is kept while others have
-- some; after the last tenant, all start again at 0.
local function count_removed(tenant, num_jobs, has_more)
  local num_left = redis.call('HINCRBY', prefix .. 'counts', 'queued', 0 - num_jobs)  -- Redis 6.2 refuses "-0"
  if has_more == nil then has_more = redis.call('EXISTS', prefix .. 'ready:' .. tenant) == 1 end
  if has_more then return num_left end
  local key, away = prefix .. 'tenants', prefix .. 'away'
  local time = redis.call('ZSCORE', key, tenant)
  redis.call('ZREM', key, tenant)
  if redis.call('EXISTS', key) == 1 then
    if time then redis.call('ZADD', away, time, tenant) end
    return num_left
  end
  redis.call('DEL', away)
  redis.call('HSET', prefix .. 'counts', 'queued', 0)
  return 0
end

local function remove_ready(tenant, member)
  if redis.call('ZREM', prefix .. 'ready:' .. tenant, member) == 1 then count_removed(tenant, 1) end
end
