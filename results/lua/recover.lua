-- Recovers the jobs of dead engines, those without a heartbeat: running -> queued, in front; running -> cancelled where that
-- was requested; running -> expired after its deadline; running -> failed for a job that keeps killing engines. Any number of
-- engines may call it.
--
-- The crash rule: `crashes` counts the engines that died with the job since it last made progress. From 2 on the job runs
-- alone (see claim), so that no other job dies with it. After 3 deaths alone, at 5, it fails.
-- Claim stores the lease of a job that runs alone as `unbegun`, and begin removes it. An engine that died in between was killed
-- by something else: `false_starts` counts those deaths. They have a limit too, since the engine may die of reading the prompt.
-- ARGV  1 most jobs to recover in this call
-- Returns for each dead engine with jobs an array: its id, the number of jobs recovered, then the ids of those that failed; call
--       again while the numbers add up to the most
-- include: queue settings record work checkpoints end_job give_back

allow_writes_without_memory()
local QUARANTINED_FROM = 5
local MAX_FALSE_STARTS = 20
local num_left = tonumber(ARGV[1])
local recovered, num_recovered = {}, 0

local function quarantine_reason(crashes, false_starts)
  if crashes >= QUARANTINED_FROM then
    return crashes .. ' engines in a row died while they ran this job, the last 3 alone'
  elseif false_starts >= MAX_FALSE_STARTS then
    return false_starts .. ' engines died between the claim of this job, alone, and its first step'
  end
end

-- Returns whether the job has failed.
local function recover_job(id, engine)
  local fields = record(id, 'engine', 'state', 'base', 'crashes', 'cancel', 'lease', 'unbegun', 'false_starts', 'n')
  if fields[1] ~= engine or fields[2] ~= 'running' then
    redis.call('SREM', prefix .. 'leases:' .. engine, id)
    return
  end
  local has_advanced = num_checkpointed(id, fields[9]) > whole_number(fields[3], 0)
  local crashes, false_starts = whole_number(fields[4], 0), whole_number(fields[8], 0)
  if has_advanced then
    crashes, false_starts = 0, 0
  elseif fields[7] == fields[6] then
    false_starts = false_starts + 1
  else
    crashes = crashes + 1
  end
  redis.call('HSET', prefix .. 'job:' .. id, 'crashes', crashes, 'false_starts', false_starts)
  local reason = quarantine_reason(crashes, false_starts)
  if not reason or fields[5] then
    give_back(id, engine, 0)
    return false
  end
  redis.call('SREM', prefix .. 'leases:' .. engine, id)
  redis.call('HDEL', prefix .. 'job:' .. id, 'lease', 'engine', 'unbegun')
  end_job(id, 'failed', 'error', nil, 'error', '{"kind":"crashed","message":"' .. reason .. '; it is not tried again"}')
  return true
end

for _, engine in ipairs(redis.call('ZRANGE', prefix .. 'engines', 0, -1)) do
  if redis.call('EXISTS', prefix .. 'engine:' .. engine) == 0 then
    local leases = prefix .. 'leases:' .. engine
    local ids = num_left > 0 and redis.call('SRANDMEMBER', leases, num_left) or {}
    local recovery = {engine, #ids}
    for _, id in ipairs(ids) do
      if recover_job(id, engine) then recovery[#recovery + 1] = id end
    end
    if #ids > 0 then recovered[#recovered + 1] = recovery end
    num_left, num_recovered = num_left - #ids, num_recovered + #ids
    if redis.call('EXISTS', leases) == 0 then
      redis.call('DEL', prefix .. 'signals:' .. engine)
      redis.call('ZREM', prefix .. 'engines', engine)
    end
  end
end
wake(num_recovered)
return recovered
