-- Counts the jobs of a batch. No transition.
-- ARGV  1 the batch
-- Returns nil (unknown) or an array: created ms, queued, delayed, running, finished, failed, cancelled, expired, the
--       milliseconds until all have ended, estimated from the pace of the last completions while jobs waited and from the jobs in
--       front of its latest jobs, -1 where that is not known, and how many jobs have a redrive, which is counted too
-- include: queue clock record work estimates

local MAX_LATEST = 256
local batch = ARGV[1]

-- For its latest jobs, which are likely to end last: how many jobs begin before the last queued one, when the last
-- delayed one is due, and since when jobs have waited.
local function latest_begin(created_ms)
  local num_ahead, due, since = nil, now, created_ms
  local ids = redis.call('LRANGE', prefix .. 'members:' .. batch, -MAX_LATEST, -1)
  for i = #ids, 1, -1 do
    local state, tenant, serial = unpack(record(ids[i], 'state', 'tenant', 'serial'))
    if state == 'delayed' then
      due = math.max(due, tonumber(redis.call('ZSCORE', prefix .. 'delayed', ids[i]) or 0))
    elseif state == 'queued' and not num_ahead then
      num_ahead, since = count_ahead(ids[i], tenant, serial), waiting_since(tenant, created_ms)
    end
  end
  return num_ahead or 0, due, since
end

local key = prefix .. 'batch:' .. batch
if redis.call('EXISTS', key) == 0 then return false end
local names = {'created', 'queued', 'delayed', 'running', 'finished', 'failed', 'cancelled', 'expired'}
local reply = {}
for i, count in ipairs(redis.call('HMGET', key, unpack(names))) do reply[i] = tonumber(count or 0) end
local num_open = reply[2] + reply[3] + reply[4]
reply[9], reply[10] = num_open == 0 and 0 or -1, tonumber(redis.call('HGET', key, 'redriven') or 0)
if num_open > 0 and not is_paused() then
  local num_ahead, due, since = latest_begin(reply[1])
  local pace = jobs_per_ms(since)
  if pace then reply[9] = math.ceil(math.max(math.max(num_open, num_ahead + 1) / pace, due - now + 1 / pace)) end
end
return reply
