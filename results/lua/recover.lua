-- Takes the jobs of dead engines, those without a heartbeat, back to the front: running -> queued, running -> cancelled
-- where that was asked for, running -> expired after its deadline, running -> failed for a job that keeps killing engines.
-- Any number of engines may call it.
--
-- The crash rule: `crashes` counts the engines that died with the job since it last made progress. From 2 on the job runs
-- alone (claim sees to that), so that it takes no batch-mates with it, and after 3 deaths alone, at 5, it has failed.
-- KEYS  1 the queue's prefix
-- ARGV  1 most jobs to take back in this call
-- Returns the number of jobs taken back; call again while it is the most

go_on_when_out_of_memory()
local QUARANTINED_FROM = 5
local num_left = tonumber(ARGV[1])

local function take_back(id, engine)
  local fields = record(id, 'engine', 'state', 'base', 'crashes', 'cancel')
  if fields[1] ~= engine or fields[2] ~= 'running' then
    redis.call('SREM', prefix .. 'leases:' .. engine, id)
    return
  end
  local has_advanced = redis.call('STRLEN', prefix .. 'tokens:' .. id) / 4 > tonumber(fields[3])
  local crashes = has_advanced and 0 or tonumber(fields[4] or 0) + 1
  redis.call('HSET', prefix .. 'job:' .. id, 'crashes', crashes)
  if crashes < QUARANTINED_FROM or fields[5] then return give_back(id, engine, 0) end
  redis.call('SREM', prefix .. 'leases:' .. engine, id)
  redis.call('HDEL', prefix .. 'job:' .. id, 'lease', 'engine')
  end_job(id, 'failed', 'error', nil, 'error', '{"kind":"crashed","message":"' .. crashes .. ' engines in a row died while '
    .. 'they ran this job, the last 3 with nothing else to do; it is not tried again"}')
end

local num_back = 0
for _, engine in ipairs(redis.call('ZRANGE', prefix .. 'engines', 0, -1)) do
  if redis.call('EXISTS', prefix .. 'engine:' .. engine) == 0 then
    local leases = prefix .. 'leases:' .. engine
    local ids = num_left > 0 and redis.call('SRANDMEMBER', leases, num_left) or {}
    for _, id in ipairs(ids) do take_back(id, engine) end
    num_left, num_back = num_left - #ids, num_back + #ids
    if redis.call('EXISTS', leases) == 0 then
      redis.call('DEL', prefix .. 'signals:' .. engine)
      redis.call('ZREM', prefix .. 'engines', engine)
    end
  end
end
wake(num_back)
return num_back
