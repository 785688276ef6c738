-- Jobs that enter the ready sets.
-- include: queue ready

-- Adds the tenant to those that have ready jobs. It starts at the least virtual time of the others, or at its own where that
-- is later.
local function activate_tenant(tenant)
  local key, away = prefix .. 'tenants', prefix .. 'away'
  if redis.call('ZSCORE', key, tenant) then return end
  local least_time = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2] or 0)
  redis.call('ZADD', key, math.max(least_time, redis.call('ZSCORE', away, tenant) or least_time), tenant)
  redis.call('ZREM', away, tenant)
  redis.call('ZREMRANGEBYSCORE', away, '-inf', least_time)
end

local function add_ready(id, tenant, priority, serial)
  activate_tenant(tenant)
  priority = math.min(2 ^ 31, tonumber(priority) or 0)  -- not a number: last
  redis.call('ZADD', prefix .. 'ready:' .. tenant, priority, ready_member(id, serial))
  redis.call('HINCRBY', prefix .. 'counts', 'queued', 1)
end
