-- A job's state, and the counts that change with it.
-- include: queue

-- Sets the state of a job, with more fields of the record (`...`), and counts it in its batch. `from` is false for a new job.
local function set_state(id, batch, from, to, ...)
  redis.call('HSET', prefix .. 'job:' .. id, 'state', to, ...)
  if not batch then return end
  local key = prefix .. 'batch:' .. batch
  if from then redis.call('HINCRBY', key, from, -1) end
  redis.call('HINCRBY', key, to, 1)
end

-- Counts jobs that are queued or delayed: the jobs of each tenant, their cost, and the cost of all.
local function count_waiting(tenant, num_jobs, num_tokens)
  local key = prefix .. 'waiting'
  redis.call('HINCRBY', key, ':tokens', num_tokens)
  redis.call('HINCRBY', key, tenant .. ':tokens', num_tokens)
  if redis.call('HINCRBY', key, tenant .. ':jobs', num_jobs) > 0 then return end
  redis.call('HDEL', key, tenant .. ':jobs', tenant .. ':tokens')
  if redis.call('HLEN', key) == 1 then redis.call('DEL', key) end  -- only the sum is left
end
