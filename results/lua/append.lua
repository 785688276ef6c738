-- Keeps output of a running job, and publishes an event of it: running -> running. Safe to repeat.
-- KEYS  1 the queue's prefix
-- ARGV  1 job id, 2 lease, 3 offset of the first token, 4 tokens (4 bytes each), 5 fingerprint of the engine's model,
--       then, when there is an event: 6 its offset, 7 its number of tokens, 8 its token ids (JSON), 9 its text
-- Returns "ok" or "stale" (the lease is not, or no longer, the job's; or the server has lost earlier output)
-- include: queue settings record lease output

-- A long stream loses its older half: its text moves to text:<id>; its token ids are in the checkpoint already.
local function trim_stream(id)
  local key = prefix .. 'result:' .. id
  local max_events = setting('max_events', 8192)
  local num_events = redis.call('XLEN', key)
  if num_events <= max_events then return end
  local num_kept = math.floor(max_events / 2)
  local texts, num_tokens, last_id = {}, 0, nil
  for _, entry in ipairs(redis.call('XRANGE', key, '-', '+', 'COUNT', num_events - num_kept)) do
    local fields = entry[2]  -- offset, its value, count, its value, tokens, their value, text, its value
    last_id, num_tokens = entry[1], fields[2] + fields[4]
    texts[#texts + 1] = fields[8]
  end
  redis.call('APPEND', prefix .. 'text:' .. id, table.concat(texts))
  redis.call('XTRIM', key, 'MAXLEN', num_kept)
  redis.call('HSET', prefix .. 'job:' .. id, 'trimmed', num_tokens, 'trimmed_id', last_id)
end

allow_writes_without_memory()
local id, lease = ARGV[1], ARGV[2]
if lease_state(id, lease) ~= 'owned' then return refuse_stale_write() end
local num_kept = extend_checkpoint(id, tonumber(ARGV[3]), ARGV[4])
if not num_kept then return refuse_stale_write() end
redis.call('HSET', prefix .. 'job:' .. id, 'fingerprint', ARGV[5])
if not ARGV[6] then return 'ok' end
if ARGV[6] + ARGV[7] > num_kept then
  return redis.error_reply('ERR the event shows tokens that the checkpoint does not hold')
end
local is_published = publish(id, record(id, 'published')[1], tonumber(ARGV[6]), ARGV[7], ARGV[8], ARGV[9])
if not is_published then return refuse_stale_write() end
trim_stream(id)
return 'ok'
