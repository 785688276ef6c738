-- Gives ready jobs to an engine: queued -> running. The tenant with the least virtual time comes first; within a tenant
-- priority, then age, but among the first jobs of one priority those with a cached prompt go first. The claim stops at the first
-- job that it may not take, so that a large job is not passed over again and again. Jobs that nobody can run now, after their
-- deadline or of another model, are set aside; after a claim that only did that, claim again. In a paused queue a claim takes
-- nothing.
-- ARGV  1 engine id, 2 claim id (repeating it returns the same jobs), 3 most jobs, 4 KV budget in tokens,
--       5 fingerprint of the engine's model, 6 jobs that the engine holds already, 7 "1" when the engine calls `begin`
--       before it computes a job that runs alone (may be omitted), 8 digests of the beginnings of prompts that the engine has
--       cached, 8 hexadecimal digits each, separated by spaces (may be omitted), 9 "1" to leave to other engines that can take
--       jobs their part of the ready ones (may be omitted)
-- Returns nil when the engine's heartbeat has expired, else an array: jobs still ready (0 while the queue is paused), jobs set
--       aside, then for each job an array: id, lease (a number), attempt, body, seed, cost, crashes, checkpoint (4 bytes a token),
--       tokens published, 1 when watched or 0, created ms, the record's protocol version, tenant, priority, then for each
--       candidate from the second on its checkpoint and its tokens published, then, if there are log-probabilities in the
--       checkpoints, an array with those of each candidate, a line of JSON for each token
-- Also: delayed jobs that are due -> queued; queued, delayed -> expired after their deadline; queued -> delayed, and
--       later failed, where the output is another model's
-- include: queue clock settings serial record work dequeue fair_share state engine_share

-- For speed: capturing a variable in a function takes longer than one more line here. So constants are written where they are used,
-- and functions that few claims need are in modules.
allow_writes_without_memory()
local engine, claim_id = ARGV[1], ARGV[2]
local max_jobs, budget = math.min(2000, tonumber(ARGV[3])), tonumber(ARGV[4])  -- the arguments of a command fit on Lua's stack
local fingerprint, is_idle, calls_begin = ARGV[5], ARGV[6] == '0', ARGV[7] == '1'
local cached = ARGV[8] and ARGV[8] ~= '' and ARGV[8]
local heartbeat, leases = prefix .. 'engine:' .. engine, prefix .. 'leases:' .. engine

local NOTHING = {}
local JOB_FIELDS = {'cost', 'seed', 'created', 'stream', 'batch', 'v', 'deadline', 'n', 'priority', 'attempt'}

-- The tokens and the log-probabilities; false for each one that does not exist.
local function read_checkpoint(name)
  return redis.call('MGET', prefix .. 'tokens:' .. name, prefix .. 'logprobs:' .. name)
end

-- A job that was never claimed has no `attempt`, and none of the fields that come with it. A fingerprint is written with the first
-- tokens: without one there is no checkpoint to read. Each field costs 1 % of a claim, so `fields` has what is needed once. A table
-- of more than 8 names takes twice the memory.
local function read_job(id, tenant)
  local f = record(id, unpack(JOB_FIELDS))
  local job = {id = id, tenant = tenant, fields = f, cost = whole_number(f[1], 0), crashes = 0, attempt = 0, lease = false}
  if f[10] then
    local crashes, mark, published, started = unpack(record(id, 'crashes', 'fingerprint', 'published', 'started'))
    job.crashes, job.attempt, job.published = whole_number(crashes, 0), whole_number(f[10], 0), whole_number(published, 0)
    job.fingerprint, job.started = mark, started
    if mark then job.tokens, job.logprobs = unpack(read_checkpoint(id)) end
  end
  return job
end

-- The reply. One command reads all bodies, and whether somebody reads the jobs live.
local function reply_with(num_left, num_set_aside, jobs)
  local keys, reply = {}, {num_left, num_set_aside}
  for i, job in ipairs(jobs) do
    keys[2 * i - 1], keys[2 * i] = prefix .. 'body:' .. job.id, prefix .. 'watched:' .. job.id
  end
  local found = #keys > 0 and redis.call('MGET', unpack(keys))
  for i, job in ipairs(jobs) do
    local f = job.fields  -- 2 is the seed, 3 created, 4 whether it is streamed, 6 the protocol's version, 8 n, 9 the priority
    local described = {job.id, job.lease, job.attempt, found[2 * i - 1], f[2], job.cost, job.crashes, job.tokens or '',
      job.published or 0, (f[4] == '1' or found[2 * i]) and 1 or 0, f[3], f[6], job.tenant, f[9]}
    local logprobs, has_logprobs = job.logprobs and {job.logprobs} or NOTHING, job.logprobs
    if f[8] then
      -- include: candidates
      logprobs = {}
      for index, suffix in ipairs(suffixes(f[8])) do
        local at, saved = index == 1 and 8 or #described + 1, read_checkpoint(job.id .. suffix)
        described[at] = saved[1] or ''
        described[at + 1] = whole_number(record(job.id, 'published' .. suffix)[1], 0)
        logprobs[index], has_logprobs = saved[2] or '', has_logprobs or saved[2]
      end
    end
    if has_logprobs then described[#described + 1] = logprobs end
    reply[i + 2] = described
  end
  return reply
end

local function must_be_alone(job)
  return job.crashes >= 2  -- without progress
end

local function take(job)
  job.lease, job.attempt = next_number(), job.attempt + 1
  local f, num_tokens = job.fields, job.tokens and #job.tokens / 4 or 0
  if f[8] then
    -- include: checkpoints
    num_tokens = num_checkpointed(job.id, f[8])
  end
  set_state(job.id, f[5], 'queued', 'running', 'lease', job.lease, 'engine', engine, 'base', num_tokens,
    'attempt', job.attempt, 'started', job.started or now)
  if calls_begin and must_be_alone(job) then redis.call('HSET', prefix .. 'job:' .. job.id, 'unbegun', job.lease) end
  if job.fingerprint then redis.call('HDEL', prefix .. 'job:' .. job.id, 'mismatch') end
end

local num_queued  -- ready jobs
local claimed, alone = {}, nil
local num_set_aside, num_expired_of = 0, {}  -- in all; by tenant, of those that have ended

local function may_take(job)
  local can_be_alone = is_idle and #claimed == 0
  return can_be_alone or not must_be_alone(job) and job.cost <= budget
end

-- Takes the job, or sets it aside; returns what its tenant is charged.
local function take_or_set_aside(job, tenant)
  local f = job.fields
  local is_gone, deadline = not (f[1] or f[3]), f[7] and tonumber(f[7])
  local is_expired = is_gone or deadline and deadline <= now  -- `expire_due` has a limit
  local fits = not is_expired
  if fits and job.fingerprint and job.fingerprint ~= fingerprint then
    -- include: other_model
    fits = restart_or_delay(job, engine)
  end
  if fits then
    take(job)
    claimed[#claimed + 1] = job
    budget = budget - job.cost
    if must_be_alone(job) then alone = job.id end
    return job.cost
  end
  num_set_aside = num_set_aside + 1
  if is_expired then num_expired_of[tenant] = (num_expired_of[tenant] or 0) + 1 end
  if is_gone then  -- somebody has deleted the record
    count_waiting(tenant, -1, 0)
  elseif is_expired then
    -- include: end_job
    end_job(job.id, 'expired', 'expired')
  end
  return 0
end

-- Takes the first jobs of one tenant while it has the least virtual time; returns whether the claim may continue.
local function serve(tenant, weight, time, next_time)
  local most = max_jobs - #claimed
  if next_time then most = math.min(most, 4) end  -- the other tenants wait
  local key = prefix .. 'ready:' .. tenant
  -- One more than the claim may take, or with cached prompts those that may go before the last of these.
  local members = redis.call('ZRANGE', key, 0, cached and most + 2 or most)
  local num_before, num_passed, cost, may_continue, is_moved = #claimed, 0, 0, true, false
  if cached then
    -- include: cached_prompts
    is_moved = put_cached_first(key, members, most)
  end
  while num_passed < most and num_passed < #members do
    if num_passed > 0 and next_time and time + cost / weight >= next_time then break end
    local job = read_job(id_of_member(members[num_passed + 1]), tenant)
    may_continue = may_take(job) and not alone
    if not may_continue then break end
    num_passed = num_passed + 1
    cost = cost + take_or_set_aside(job, tenant)
  end
  if #claimed > num_before then
    count_waiting(tenant, num_before - #claimed, 0 - cost)
    charge(tenant, cost, weight)
  end
  if num_passed > 0 then
    if is_moved then redis.call('ZREM', key, unpack(members, 1, num_passed))
    else redis.call('ZREMRANGEBYRANK', key, 0, num_passed - 1) end
  end
  num_queued = count_removed(tenant, num_passed, #members > num_passed)  -- also where somebody has deleted the set
  return may_continue
end

local since, last_id, last_claimed, last_alone =
  unpack(redis.call('HMGET', heartbeat, 'since', 'claim', 'claimed', 'alone'))
if not since then return false end
if last_id == claim_id then
  -- include: lease
  local jobs, lease = {}, tonumber(string.match(last_claimed, '^%d+') or nil)
  for id in string.gmatch(last_claimed, ' (%S+)') do
    if lease_state(id, string.format('%d', lease)) == 'owned' then
      jobs[#jobs + 1] = read_job(id, record(id, 'tenant')[1])
      jobs[#jobs].lease = lease
    end
    lease = lease + 1
  end
  return reply_with(num_ready(), 0, jobs)
end
local runs_alone = last_alone and redis.call('SISMEMBER', leases, last_alone) == 1

if redis.call('EXISTS', prefix .. 'deadlines', prefix .. 'delayed') > 0 then
  -- include: due
  expire_due()
  promote_due()
end
num_queued = num_ready()
local asked_jobs, is_full = max_jobs, runs_alone
if ARGV[9] == '1' and num_queued > 0 then max_jobs = engine_share(engine, max_jobs, num_queued) end
local may_continue = not runs_alone and max_jobs > 0 and num_queued > 0
local is_queue_paused = not may_continue and is_paused()
if may_continue then reserve_serials(math.min(max_jobs, num_queued)) end
local MAX_SET_ASIDE = 256  -- jobs that one claim sets aside,
local MAX_EXPIRED_OF_ONE = 16  -- and those of one tenant whose deadline has passed, when other tenants wait
local num_passed_over = 0  -- tenants in front with so many expired jobs that the others would wait for them
while may_continue and not alone and #claimed < max_jobs and num_set_aside < MAX_SET_ASIDE do
  local tenant, time, next_tenant, next_time =
    unpack(redis.call('ZRANGE', prefix .. 'tenants', num_passed_over, num_passed_over + 1, 'WITHSCORES'))
  if not tenant then break end
  local paused, weight = unpack(redis.call('HMGET', prefix .. 'settings', 'paused', 'weight:' .. tenant))
  is_queue_paused = paused == '1'
  if is_queue_paused then break end
  local num_before = #claimed
  may_continue = serve(tenant, valid_weight(weight), tonumber(time), tonumber(next_time))
  is_full = not may_continue
  local is_first_still = #claimed == num_before and redis.call('ZSCORE', prefix .. 'tenants', tenant)
  if is_first_still and next_tenant and (num_expired_of[tenant] or 0) >= MAX_EXPIRED_OF_ONE then
    num_passed_over = num_passed_over + 1
  end
end

-- The leases of a claim follow one another, so the first one is enough to repeat it.
local ids = {}
for i, job in ipairs(claimed) do ids[i] = job.id end
if #ids > 0 then redis.call('SADD', leases, unpack(ids)) end
is_full = is_full or alone or #claimed >= asked_jobs
redis.call('HSET', heartbeat, 'claim', claim_id,
  'claimed', #ids > 0 and string.format('%d ', claimed[1].lease) .. table.concat(ids, ' ') or '',
  'takes_until', is_full and 0 or now + TAKES_JOBS_MS)
if alone then redis.call('HSET', heartbeat, 'alone', alone) end
local num_left = is_queue_paused and 0 or num_queued
if num_left == 0 then redis.call('DEL', prefix .. 'wake') elseif #claimed > 0 or max_jobs <= 0 then wake(1) end
return reply_with(num_left, num_set_aside, claimed)
