-- Work for engines: ready jobs that may be claimed.
-- include: queue

local function num_ready()
  return tonumber(redis.call('HGET', prefix .. 'counts', 'queued') or 0)
end

local function is_paused()
  return redis.call('HGET', prefix .. 'settings', 'paused') == '1'
end

-- Wakes up to num_jobs idle engines.
local MAX_WAKE_TOKENS = 64
local function wake(num_jobs)
  local key = prefix .. 'wake'
  local num_tokens = math.min(num_jobs, MAX_WAKE_TOKENS - redis.call('LLEN', key))
  for _ = 1, num_tokens do redis.call('RPUSH', key, '1') end
end
