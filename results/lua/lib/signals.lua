-- Signals to engines about their jobs.
-- include: queue

local function signal(engine, kind, id)
  local key = prefix .. 'signals:' .. engine
  redis.call('RPUSH', key, kind .. ' ' .. id)
  redis.call('LTRIM', key, -1000, -1)
  redis.call('PEXPIRE', key, 60000)
end

-- Whether somebody reads a job live: from the start (the record's `stream`), or now.
local function is_watched(id, is_streamed)
  return is_streamed == '1' or redis.call('EXISTS', prefix .. 'watched:' .. id) == 1
end
