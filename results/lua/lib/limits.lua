-- The limits of a queue, and the jobs that this call has created.
-- include: queue work

-- By tenant, the jobs that this call has created: their number, their cost, and those ready at once as arguments of ZADD. One
-- call brings many jobs of few tenants, so `enqueue_created` counts and adds them together. With them, as `limits`, those that
-- apply to the tenant.
local created = {}
local function created_of(tenant)
  created[tenant] = created[tenant] or {num_jobs = 0, num_tokens = 0, ready = {}}
  return created[tenant]
end

-- The first limit of this queue that one more job would exceed: "full <setting> <value>", or "oversized <setting> <value>"
-- where the job would exceed it in an empty queue too. nil where no limit is reached.
local function limit_reached(tenant, cost)
  local own = created_of(tenant)
  local limits = own.limits
  if not limits then
    limits = redis.call('HMGET', prefix .. 'settings', 'max_queued_jobs', 'max_queued_tokens', 'tenant_max_queued_jobs',
      'tenant_max_queued_tokens', 'tenant_max_queued_jobs:' .. tenant, 'tenant_max_queued_tokens:' .. tenant)
    limits[3], limits[4], own.limits = limits[5] or limits[3], limits[6] or limits[4], limits
  end
  if not (limits[1] or limits[2] or limits[3] or limits[4]) then return nil end
  local waiting = redis.call('HMGET', prefix .. 'waiting', ':tokens', tenant .. ':jobs', tenant .. ':tokens')
  local num_jobs = num_ready() + redis.call('ZCARD', prefix .. 'delayed')
  local num_ready_too, num_tokens = 0, 0  -- created by this call, and not yet counted
  for _, jobs in pairs(created) do
    num_ready_too, num_tokens = num_ready_too + #jobs.ready / 2, num_tokens + jobs.num_tokens
  end
  local would_be = {num_jobs + num_ready_too + 1, (waiting[1] or 0) + num_tokens + cost,
    (waiting[2] or 0) + own.num_jobs + 1, (waiting[3] or 0) + own.num_tokens + cost}
  for i, name in ipairs({'max_queued_jobs', 'max_queued_tokens', 'tenant_max_queued_jobs', 'tenant_max_queued_tokens'}) do
    local limit = tonumber(limits[i] or nil)
    if limit and would_be[i] > limit then
      local is_oversized = string.find(name, 'tokens') and tonumber(cost) > limit
      return (is_oversized and 'oversized ' or 'full ') .. name .. ' ' .. limits[i]
    end
  end
end
