-- Renews an engine's heartbeat, and compares the leases that the engine holds with its leases in Redis. A job that the engine
-- does not name in two heartbeats in a row goes back: running -> queued; the attempt does not count. (In one heartbeat it may
-- be missing because the reply to its claim is on its way.) Engines with a longer limit than a new engine get a `beat now`.
-- Also: delayed jobs that are due -> queued; queued, delayed -> expired after their deadline.
-- ARGV  1 engine id, 2 how long the engine counts as alive in ms, 3 its sleep level: "0" (awake), "1" or "2", 4 the name of
--       its model, then for each job that it holds 2 values: id, lease
-- Returns an array: four arrays of job ids (lost, to be cancelled, watched, past their deadline), then the
--       requested sleep level, 0 to 2, then the milliseconds until the next heartbeat of this engine should come: when that of
--       any engine expires, or when the next job is due; then the number of the last requested reset of the prefix cache, 0
--       where there was none
-- include: queue clock settings record lease work signals give_back due

allow_writes_without_memory()
local engine = ARGV[1]
local heartbeat = prefix .. 'engine:' .. engine
local is_new = redis.call('HSETNX', heartbeat, 'since', now) == 1
if is_new then
  redis.call('HSET', heartbeat, 'sleep', ARGV[3])  -- an engine whose heartbeat had expired keeps its level
  redis.call('HSET', prefix .. 'counts', 'served', now)
end
redis.call('PEXPIRE', heartbeat, ARGV[2])
redis.call('ZADD', prefix .. 'engines', now, engine)
expire_due()

local held, lost, cancelled, watched, expired = {}, {}, {}, {}, {}
for i = 5, #ARGV, 2 do
  local id, lease = ARGV[i], ARGV[i + 1]
  held[id] = true
  local state = lease_state(id, lease)
  if state == 'stale' then
    lost[#lost + 1] = id
  elseif state == 'owned' then
    local fields = record(id, 'cancel', 'stream', 'expire')
    if fields[1] then cancelled[#cancelled + 1] = id end
    if fields[3] then expired[#expired + 1] = id end
    if is_watched(id, fields[2]) then watched[#watched + 1] = id end
  end
end

local missed_before = redis.call('HGET', heartbeat, 'missed') or ''
local missed = {}
for _, id in ipairs(redis.call('SMEMBERS', prefix .. 'leases:' .. engine)) do
  if not held[id] then
    local lease = record(id, 'lease')[1] or ''
    local mark = ' ' .. id .. ' ' .. lease .. ' '
    if string.find(missed_before, mark, 1, true) then
      give_back_uncounted(id, engine, 0)
    else
      missed[#missed + 1] = mark
    end
  end
end
redis.call('HSET', heartbeat, 'missed', table.concat(missed), 'asleep', ARGV[3], 'model', ARGV[4])

local next_beat_ms, num_alive = tonumber(ARGV[2]), 0
for _, other in ipairs(redis.call('ZRANGE', prefix .. 'engines', 0, -1)) do
  local left_ms = redis.call('PTTL', prefix .. 'engine:' .. other)
  if left_ms > 0 then next_beat_ms, num_alive = math.min(next_beat_ms, left_ms), num_alive + 1 end  -- else it is dead
  if is_new and left_ms > tonumber(ARGV[2]) then signal(other, 'beat', 'now') end  -- there is a shorter limit now
end

promote_due()
local due_ms = next_due_ms()
if due_ms then next_beat_ms = math.min(next_beat_ms, math.max(due_ms, 50 * num_alive)) end  -- all engines: one in 50 ms
if num_ready() > 0 and not is_paused() and redis.call('EXISTS', prefix .. 'wake') == 0 then wake(1) end
local requested = redis.call('HMGET', heartbeat, 'sleep', 'reset_cache')
return {lost, cancelled, watched, expired, tonumber(requested[1] or 0), next_beat_ms, whole_number(requested[2], 0)}
