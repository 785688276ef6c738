-- Ready jobs are shared between the engines that can take some: those whose last claim, a moment ago, took less than it could.
-- include: queue clock

local TAKES_JOBS_MS = 2000  -- an engine without jobs claims every second

-- How many jobs this engine may take, up to max_jobs, so that the other engines can come to hold as many. `num_jobs` are ready.
local function engine_share(engine, max_jobs, num_jobs)
  local engines = redis.call('ZRANGE', prefix .. 'engines', 0, -1)
  if num_jobs >= max_jobs * #engines then return max_jobs end  -- enough for all
  local num_held, num_sharing = redis.call('SCARD', prefix .. 'leases:' .. engine), 1
  num_jobs = num_jobs + num_held
  for _, other in ipairs(engines) do
    local takes_until = other ~= engine and redis.call('HGET', prefix .. 'engine:' .. other, 'takes_until')
    if takes_until and tonumber(takes_until) > now then
      num_jobs, num_sharing = num_jobs + redis.call('SCARD', prefix .. 'leases:' .. other), num_sharing + 1
    end
  end
  return math.min(max_jobs, math.ceil(num_jobs / num_sharing) - num_held)
end
