-- Counts the jobs of a queue. No transition.
-- Returns an array: queued, delayed, running, engines alive, finished, failed, cancelled, expired, generated tokens,
--       stale writes, the expected tokens of the queued and delayed jobs, the age of the oldest queued job in ms or 0, 1 when
--       paused or 0, and an array: for each engine alive its id and its sleep level, 0 (awake) to 2; 1 when an engine
--       has ever served the queue, or 0; the number of inbox entries that were rejected; the entries in the inbox; last an
--       array: for each engine alive its id and the name of its model
-- include: queue clock record work dequeue

-- A tenant's jobs of one priority are sorted by age, so the first ones of all tenants and priorities are enough.
local MAX_LOOKED_AT = 64
local function oldest_age_ms()
  local age_ms, num_left = 0, MAX_LOOKED_AT
  for _, tenant in ipairs(redis.call('ZRANGE', prefix .. 'tenants', 0, MAX_LOOKED_AT - 1)) do
    local least = '-inf'
    while least and num_left > 0 do
      num_left = num_left - 1
      local member, priority =
        unpack(redis.call('ZRANGE', prefix .. 'ready:' .. tenant, least, '+inf', 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES'))
      local created_ms = member and record(id_of_member(member), 'created')[1]
      age_ms = math.max(age_ms, now - (tonumber(created_ms or now) or now))
      least = priority and '(' .. priority
    end
  end
  return age_ms
end

local num_running, engines, models = 0, {}, {}
for _, engine in ipairs(redis.call('ZRANGE', prefix .. 'engines', 0, -1)) do
  num_running = num_running + redis.call('SCARD', prefix .. 'leases:' .. engine)
  if redis.call('EXISTS', prefix .. 'engine:' .. engine) == 1 then
    local told = redis.call('HMGET', prefix .. 'engine:' .. engine, 'asleep', 'model')
    engines[#engines + 1], models[#models + 1] = engine, engine
    engines[#engines + 1], models[#models + 1] = tonumber(told[1] or 0), told[2] or ''
  end
end
local reply = {num_ready(), redis.call('ZCARD', prefix .. 'delayed'), num_running, #engines / 2}
local names = {'finished', 'failed', 'cancelled', 'expired', 'generated_tokens', 'stale_writes'}
for i, count in ipairs(redis.call('HMGET', prefix .. 'counts', unpack(names))) do
  reply[4 + i] = tonumber(count or 0)
end
reply[11] = tonumber(redis.call('HGET', prefix .. 'waiting', ':tokens') or 0)
reply[12] = oldest_age_ms()
reply[13] = is_paused() and 1 or 0
reply[14] = engines
local more = redis.call('HMGET', prefix .. 'counts', 'served', 'rejected')
reply[15], reply[16] = (#engines > 0 or more[1]) and 1 or 0, tonumber(more[2] or 0)
reply[17] = redis.call('XLEN', prefix .. 'inbox')
reply[18] = models
return reply
