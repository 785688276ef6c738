-- A job whose checkpoint is of another model. Only `claim` includes this.
-- include: queue clock settings state candidates signals end_job

-- A checkpoint of another model is dropped while nobody has seen any of it; otherwise the job waits for an engine that can
-- continue it. Returns whether this engine may take the job.
local function restart_or_delay(job, engine)
  local key, n, batch = prefix .. 'job:' .. job.id, job.fields[8], job.fields[5]
  if job.published == 0 then
    for _, suffix in ipairs(suffixes(n)) do
      redis.call('DEL', prefix .. 'tokens:' .. job.id .. suffix, prefix .. 'logprobs:' .. job.id .. suffix)
    end
    redis.call('HDEL', key, 'fingerprint')
    job.tokens, job.logprobs = nil, nil
    return true
  end
  local is_new = redis.call('HSETNX', key, 'mismatch', now) == 1
  if now - whole_number(redis.call('HGET', key, 'mismatch'), 0) < setting('mismatch_wait_ms', 600000) then
    set_state(job.id, batch, 'queued', 'delayed')
    -- From 1 ms to a second, by chance. Idle engines claim once a second, in an order that hardly changes: if the delay were
    -- always a second too, the engine that cannot continue the job would be the first to claim it each time.
    redis.call('ZADD', prefix .. 'delayed', now + 2 ^ (clock[2] % 11), job.id)
    if is_new then signal(engine, 'mismatch', job.id) end
  else
    signal(engine, 'mismatch_failed', job.id)
    end_job(job.id, 'failed', 'error', nil, 'error', '{"kind":"fingerprint_mismatch","message":"the output so far is of '
      .. 'another model, tokenizer or dtype than this queue\'s engines have; submit the job again under a new id"}')
  end
  return false
end
