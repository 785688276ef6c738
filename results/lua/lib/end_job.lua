-- The end of a job: any state -> a terminal one.
-- include: queue clock settings record candidates state

-- A batch is kept as long as the records of its jobs, from the end of the last one on.
local function close_batch(batch, keep_ms)
  local key = prefix .. 'batch:' .. batch
  for _, count in ipairs(redis.call('HMGET', key, 'queued', 'delayed', 'running')) do
    if tonumber(count or 0) > 0 then return end
  end
  redis.call('PEXPIRE', key, keep_ms)
  redis.call('PEXPIRE', prefix .. 'members:' .. batch, keep_ms)
end

-- The fields of the record that `end_job` needs.
local END_FIELDS = {'published', 'trimmed', 'state', 'batch', 'deadline', 'meta', 'tenant', 'cost', 'fingerprint', 'n'}

-- Redis reserves 4 KiB for the next entries of a stream (`stream-node-max-bytes`), which is four fifths of the memory of a short
-- job. A copy takes what its entries need. Clients that wait for the stream get its last entry all the same. REPLACE: a server
-- that refuses RENAME leaves the copy of another stream.
local function shrink(stream)
  redis.call('COPY', stream, prefix .. 'copy', 'REPLACE')
  redis.call('RENAME', prefix .. 'copy', stream)
end

-- Ends a job that the caller has removed from ready, delayed or leases. `known` are the END_FIELDS where the caller has read
-- them, else nil; with them come `settings`, the two times, and `changes`, more fields of the record to set, or nil. `...` are
-- more fields of the terminal entry: prompt_tokens, completion_tokens, cached_tokens, error, first_token, prompt_logprobs, reasons,
-- stop_reasons.
local function end_job(id, state, reason, known, ...)
  local published, trimmed, from, batch, deadline, meta, tenant, cost, fingerprint, n =
    unpack(known or record(id, unpack(END_FIELDS)))
  local times = known and known.settings or redis.call('HMGET', prefix .. 'settings', 'result_ttl_ms', 'record_ttl_ms')
  local keep_ms = whole_number(times[1], 86400000)
  local record_ms = math.max(keep_ms, whole_number(times[2], keep_ms))
  local result = prefix .. 'result:' .. id
  redis.call('XADD', result, '*', 'state', state, 'reason', reason, 'offset', whole_number(published, 0), ...)
  set_state(id, batch, from, state, 'ended', now, unpack(known and known.changes or {}))
  redis.call('PEXPIRE', prefix .. 'job:' .. id, record_ms)
  redis.call('PEXPIRE', prefix .. 'body:' .. id, record_ms)
  redis.call('PEXPIRE', result, keep_ms)
  if fingerprint then  -- written with the first tokens: without one there is no checkpoint
    for _, suffix in ipairs(suffixes(n)) do
      local name = id .. suffix
      if trimmed then  -- the oldest part of the output is not in the stream
        redis.call('PEXPIRE', prefix .. 'tokens:' .. name, keep_ms)
        redis.call('PEXPIRE', prefix .. 'text:' .. name, keep_ms)
        redis.call('PEXPIRE', prefix .. 'logprobs:' .. name, keep_ms)
        redis.call('PEXPIRE', prefix .. 'chat:' .. name, keep_ms)
      else
        redis.call('DEL', prefix .. 'tokens:' .. name, prefix .. 'logprobs:' .. name)
      end
    end
  end
  if meta then redis.call('PEXPIRE', prefix .. 'meta:' .. id, record_ms) end
  if deadline then redis.call('ZREM', prefix .. 'deadlines', id) end
  if batch then close_batch(batch, record_ms) end
  if from == 'queued' or from == 'delayed' then count_waiting(tenant, -1, 0 - whole_number(cost, 0)) end
  redis.call('XADD', prefix .. 'done', 'MAXLEN', '~', 100000, '*', 'id', id, 'state', state)
  redis.call('HINCRBY', prefix .. 'counts', state, 1)
  if state == 'failed' then
    local dead = prefix .. 'dead'
    local old = redis.call('ZRANGEBYSCORE', dead, '-inf', now - record_ms, 'LIMIT', 0, 256)
    if #old > 0 then redis.call('ZREM', dead, unpack(old)) end
    redis.call('ZADD', dead, now, id)
    if redis.call('PTTL', dead) < record_ms then redis.call('PEXPIRE', dead, record_ms) end
    local kind = string.match(table.concat({...}, ' '), '"kind":"([%w_]+)"')
    if kind then redis.call('HSET', prefix .. 'job:' .. id, 'error_kind', kind) end
  end
  shrink(result)  -- last: all is written where a user's rights do not suffice for it
end
