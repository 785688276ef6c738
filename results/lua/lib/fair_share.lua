-- Fair share. A claim charges a job's cost to its tenant, giving the job back refunds it, and its end corrects it to the tokens
-- that the job took. A tenant with twice the weight pays half, so it gets twice the tokens.
-- include: queue

local MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e6  -- virtual times stay numbers that can be added
local function valid_weight(text)
  local weight = tonumber(text or nil)
  return weight and weight >= MIN_WEIGHT and weight <= MAX_WEIGHT and weight or 1
end

local function weight_of(tenant)
  return valid_weight(redis.call('HGET', prefix .. 'settings', 'weight:' .. tenant))
end

-- `weight` is that of the tenant where the caller has read it, else nil.
local function charge(tenant, num_tokens, weight)
  local time = num_tokens / (weight or weight_of(tenant))
  if not redis.call('ZADD', prefix .. 'tenants', 'XX', 'INCR', time, tenant) then
    redis.call('ZADD', prefix .. 'away', 'XX', 'INCR', time, tenant)
  end
end
