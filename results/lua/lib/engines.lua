-- Requests to running engines.
-- include: queue signals

-- Writes a request into the heartbeat of one engine, or of all with a heartbeat where `only` is "", and signals these engines to
-- send the next heartbeat at once: its reply has the request. Returns their ids.
local function request_of_engines(only, field, value)
  local signalled = {}
  for _, engine in ipairs(redis.call('ZRANGE', prefix .. 'engines', 0, -1)) do
    local heartbeat = prefix .. 'engine:' .. engine
    if (only == '' or only == engine) and redis.call('EXISTS', heartbeat) == 1 then
      redis.call('HSET', heartbeat, field, value)
      signal(engine, 'beat', 'now')
      signalled[#signalled + 1] = engine
    end
  end
  return signalled
end
