-- Gives ready jobs to an engine: queued -> running. The tenant with the least virtual time comes first; within a tenant
-- priority, then age, but among the first jobs of one priority those with a cached prompt go first. The claim stops at the first
-- job that it may not take, so that a large job is not passed over again and again. Jobs that nobody can run now, after their
-- deadline or of another model, are set aside; after a claim that only did that, claim again. In a paused queue a claim takes
-- nothing.
-- KEYS  1 the queue's prefix
-- ARGV  1 engine id, 2 claim id (repeating it returns the same jobs), 3 most jobs, 4 KV budget in tokens,
--       5 fingerprint of the engine's model, 6 jobs that the engine holds already, 7 "1" when the engine calls `begin`
--       before it computes a job that runs alone (may be omitted), 8 digests of the beginnings of prompts that the engine has
--       cached, 8 hexadecimal digits each, separated by spaces (may be omitted), 9 "1" to leave to other engines that can take
--       jobs their part of the ready ones (may be omitted)
-- Returns nil when the engine's heartbeat has expired, else an array: jobs still ready (0 while the queue is paused), jobs set
--       aside, then for each job an array: id, lease, attempt, body, seed, cost, crashes, checkpoint (4 bytes a token),
--       tokens published, 1 when watched or 0, created ms, the record's protocol version, tenant, priority, then for each
--       candidate from the second on its checkpoint and its tokens published, then, if there are log-probabilities in the
--       checkpoints, an array with those of each candidate, a line of JSON for each token
-- Also: delayed jobs that are due -> queued; queued, delayed -> expired after their deadline; queued -> delayed, and
--       later failed, where the output is another model's
-- include: queue clock settings serial record work dequeue fair_share state engine_share

allow_writes_without_memory()
local MAX_JOBS = 2000  -- so that the arguments of a command fit on Lua's stack
local engine, claim_id, max_jobs, budget = ARGV[1], ARGV[2], math.min(MAX_JOBS, tonumber(ARGV[3])), tonumber(ARGV[4])
local fingerprint, is_idle, calls_begin = ARGV[5], ARGV[6] == '0', ARGV[7] == '1'
local heartbeat = prefix .. 'engine:' .. engine
local leases = prefix .. 'leases:' .. engine

local ALONE_FROM = 2  -- crashes without progress
local MAX_SET_ASIDE = 256  -- jobs that one claim sets aside,
local MAX_EXPIRED_OF_ONE = 16  -- and those of one tenant whose deadline has passed, when other tenants wait
local MAX_READ_AHEAD = 4  -- jobs of one tenant, when other tenants wait

local NOTHING = {}

local cached = ARGV[8] and ARGV[8] ~= '' and ARGV[8]
local JOB_FIELDS = {'cost', 'seed', 'created', 'stream', 'batch', 'v', 'deadline', 'n', 'priority', 'attempt'}
if cached then JOB_FIELDS[11] = 'passed_over' end

-- The tokens and the log-probabilities; false for each one that does not exist.
local function read_checkpoint(name)
  return redis.call('MGET', prefix .. 'tokens:' .. name, prefix .. 'logprobs:' .. name)
end

-- A job that was never claimed has no `attempt`, and none of the fields that come with it. A fingerprint is written with the first
-- tokens: without one there is no checkpoint to read. Each field costs 1 % of a claim, so `fields` has what is needed once.
local function read_job(id, tenant)
  local f = record(id, unpack(JOB_FIELDS))
  local crashes, mark, published, started, saved = nil, nil, nil, nil, NOTHING
  if f[10] then
    crashes, mark, published, started = unpack(record(id, 'crashes', 'fingerprint', 'published', 'started'))
    if mark then saved = read_checkpoint(id) end
  end
  local job = {id = id, tenant = tenant, cost = whole_number(f[1], 0), crashes = whole_number(crashes, 0), fingerprint = mark,
    published = whole_number(published, 0), attempt = whole_number(f[10], 0), started = started, fields = f,
    is_gone = not (f[1] or f[3]), batch = f[5], deadline = tonumber(f[7] or nil), n = f[8], priority = f[9],
    tokens = saved[1] or ''}
  if saved[2] then job.logprobs = saved[2] end
  return job
end

-- What is needed of a job that others may pass over.
local function read_some(id)
  local f = record(id, 'cost', 'crashes', 'priority', 'passed_over')
  return {id = id, cost = whole_number(f[1], 0), crashes = whole_number(f[2], 0), is_gone = not (f[1] or f[3]),
    priority = f[3], num_times = f[4] or 0}
end

-- The reply. One command reads all bodies, and whether somebody reads the jobs live.
local function reply_with(num_left, num_set_aside, jobs)
  local keys, reply = {}, {num_left, num_set_aside}
  for i, job in ipairs(jobs) do
    keys[2 * i - 1], keys[2 * i] = prefix .. 'body:' .. job.id, prefix .. 'watched:' .. job.id
  end
  local found = #keys > 0 and redis.call('MGET', unpack(keys))
  for i, job in ipairs(jobs) do
    local f = job.fields  -- 2 is the seed, 3 created, 4 whether it is streamed, 6 the protocol's version
    local described = {job.id, job.lease, job.attempt, found[2 * i - 1], f[2], job.cost, job.crashes, job.tokens,
      job.published, (f[4] == '1' or found[2 * i]) and 1 or 0, f[3], f[6], job.tenant, job.priority}
    local logprobs, has_logprobs = {job.logprobs}, job.logprobs
    if job.n then
      -- include: candidates
      for index, suffix in ipairs(suffixes(job.n)) do
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

local function repeat_claim(claimed)
  -- include: lease
  local jobs = {}
  for id, lease in string.gmatch(claimed, '(%S+) (%S+)') do
    if lease_state(id, lease) == 'owned' then
      jobs[#jobs + 1] = read_job(id, record(id, 'tenant')[1])
      jobs[#jobs].lease = lease
    end
  end
  return reply_with(num_ready(), 0, jobs)
end

-- A checkpoint of another model is dropped while nobody has seen any of it; otherwise the job waits for an engine that can
-- continue it.
local function fits_this_model(job)
  if not job.fingerprint or job.fingerprint == fingerprint then return true end
  -- include: candidates signals end_job
  local key = prefix .. 'job:' .. job.id
  if job.published == 0 then
    for _, suffix in ipairs(suffixes(job.n)) do
      redis.call('DEL', prefix .. 'tokens:' .. job.id .. suffix, prefix .. 'logprobs:' .. job.id .. suffix)
    end
    redis.call('HDEL', key, 'fingerprint')
    job.tokens, job.logprobs = '', nil
    return true
  end
  local is_new = redis.call('HSETNX', key, 'mismatch', now) == 1
  if now - whole_number(redis.call('HGET', key, 'mismatch'), 0) < setting('mismatch_wait_ms', 600000) then
    set_state(job.id, job.batch, 'queued', 'delayed')
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

local function must_be_alone(job)
  return job.crashes >= ALONE_FROM
end

local function take(job)
  job.lease, job.attempt = next_serial(), job.attempt + 1
  local num_tokens = #job.tokens / 4
  if job.n then
    -- include: checkpoints
    num_tokens = num_checkpointed(job.id, job.n)
  end
  set_state(job.id, job.batch, 'queued', 'running', 'lease', job.lease, 'engine', engine, 'base', num_tokens,
    'attempt', job.attempt, 'started', job.started or now, unpack(job.changes or NOTHING))
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
  local is_expired = job.is_gone or job.deadline and job.deadline <= now  -- `expire_due` has a limit
  if not is_expired and fits_this_model(job) then
    take(job)
    claimed[#claimed + 1] = job
    budget = budget - job.cost
    if must_be_alone(job) then alone = job.id end
    return job.cost
  end
  num_set_aside = num_set_aside + 1
  if is_expired then num_expired_of[tenant] = (num_expired_of[tenant] or 0) + 1 end
  if job.is_gone then  -- somebody has deleted the record
    count_waiting(tenant, -1, 0)
  elseif is_expired then
    -- include: end_job
    end_job(job.id, 'expired', 'expired')
  end
  return 0
end

-- Where the engine has cached prompts: one of the next jobs of a tenant goes first if its prompt is cached and that of the first
-- one is not.
local MAX_LOOKAHEAD, MAX_PASSED_OVER = 16, 16  -- jobs that are looked at; jobs that may pass over one first job

-- The first members of a ready set: those that the claim may take, and with cached prompts those that may pass over them. The
-- second value says by rank whether a prompt is cached; nil where no job can pass over another one.
local function read_ready(key, most)
  local members = redis.call('ZRANGE', key, 0, most - 1 + (cached and MAX_LOOKAHEAD - 1 or 0))
  if not cached then return members end
  local is_cached, num_cached = {}, 0
  local sub, search = string.sub, string.find
  for rank = 1, #members do
    if search(cached, sub(members[rank], 18, 25), 1, true) then
      is_cached[rank], num_cached = true, num_cached + 1
      if num_cached == most and rank == most then return members end
    end
  end
  return members, num_cached > 0 and is_cached or nil
end

-- Returns a function that returns the rank of the job to take and the job: members[first], or one of the next ones. Only a
-- first job that the claim may take is passed over; it is added to `passed_over`.
local function cached_first(tenant, members, is_cached, passed_over, most)
  local job, num_seen = {}, 0  -- members[num_seen] and those before it pass over no other job any more
  return function(first, num_passed)
    local id = id_of_member(members[first])
    if is_cached[first] then return first, read_job(id, tenant) end
    if job.id ~= id then
      job = num_passed < most - 1 and read_job(id, tenant) or read_some(id)  -- the last job that the claim takes is another one
    end
    for rank = math.max(first, num_seen) + 1, math.min(num_passed + MAX_LOOKAHEAD, #members) do
      if alone or job.is_gone or not may_take(job) then break end
      if is_cached[rank] then
        local other = read_job(id_of_member(members[rank]), tenant)
        local num_times = job.changes and job.changes[2] or whole_number(job.num_times or job.fields[11], 0)
        if other.priority ~= job.priority or num_times >= MAX_PASSED_OVER then break end
        if other.cost <= budget and not must_be_alone(other) then
          if not job.changes then passed_over[#passed_over + 1] = job end
          num_seen, job.changes = rank, {'passed_over', num_times + 1}
          return rank, other
        end
      end
      num_seen = rank
    end
    return first, job.fields and job or read_job(id, tenant)
  end
end

-- Takes the first jobs of one tenant while it has the least virtual time; returns whether the claim may continue.
local function serve(tenant, time, next_time)
  local most = max_jobs - #claimed
  if next_time then most = math.min(most, MAX_READ_AHEAD) end
  local key, weight = prefix .. 'ready:' .. tenant, weight_of(tenant)
  local num_before, num_passed, cost, may_continue = #claimed, 0, 0, true
  local members, is_cached = read_ready(key, most)
  local first = 1  -- the rank of the first job that is left
  local ahead, is_ahead, passed_over = {}, {}, {}  -- the ranks of the jobs that went before it; jobs that were passed over
  local next_job = is_cached and cached_first(tenant, members, is_cached, passed_over, most)
  while num_passed < most and first <= #members do
    if num_passed > 0 and next_time and time + cost / weight >= next_time then break end
    local rank, job = first, nil
    if next_job then rank, job = next_job(first, num_passed) else job = read_job(id_of_member(members[first]), tenant) end
    may_continue = may_take(job) and not alone
    if not may_continue then break end
    num_passed = num_passed + 1
    cost = cost + take_or_set_aside(job, tenant)
    if rank > first then
      is_ahead[rank], ahead[#ahead + 1] = true, rank
    else
      repeat first = first + 1 until not is_ahead[first]
    end
  end
  if #claimed > num_before then
    count_waiting(tenant, num_before - #claimed, 0 - cost)
    charge(tenant, cost, weight)
  end
  local apart = {}  -- those that are not in front of the first job that is left
  for _, rank in ipairs(ahead) do
    if rank > first then apart[#apart + 1] = members[rank] end
  end
  if #apart > 0 then redis.call('ZREM', key, unpack(apart)) end
  if first > 1 then redis.call('ZREMRANGEBYRANK', key, 0, first - 2) end
  for _, job in ipairs(passed_over) do
    if not job.lease then redis.call('HSET', prefix .. 'job:' .. job.id, unpack(job.changes)) end
  end
  num_queued = count_removed(tenant, num_passed, #members > num_passed)  -- also where somebody has deleted the set
  return may_continue
end

local since, last_id, last_claimed, last_alone =
  unpack(redis.call('HMGET', heartbeat, 'since', 'claim', 'claimed', 'alone'))
if not since then return false end
if last_id == claim_id then return repeat_claim(last_claimed) end
local runs_alone = last_alone and redis.call('SISMEMBER', leases, last_alone) == 1

if redis.call('EXISTS', prefix .. 'deadlines', prefix .. 'delayed') > 0 then
  -- include: due
  expire_due()
  promote_due()
end
local is_queue_paused = is_paused()
num_queued = num_ready()
local asked_jobs, is_full = max_jobs, runs_alone
if ARGV[9] == '1' and num_queued > 0 then max_jobs = engine_share(engine, max_jobs, num_queued) end
local num_takeable = (runs_alone or is_queue_paused) and 0 or math.min(max_jobs, num_queued)
local may_continue = num_takeable > 0
if may_continue then reserve_serials(num_takeable) end
local num_passed_over = 0  -- tenants in front with so many expired jobs that the others would wait for them
while may_continue and not alone and #claimed < max_jobs and num_set_aside < MAX_SET_ASIDE do
  local tenant, time, next_tenant, next_time =
    unpack(redis.call('ZRANGE', prefix .. 'tenants', num_passed_over, num_passed_over + 1, 'WITHSCORES'))
  if not tenant then break end
  local num_before = #claimed
  may_continue = serve(tenant, tonumber(time), tonumber(next_time))
  is_full = not may_continue
  local is_first_still = #claimed == num_before and redis.call('ZSCORE', prefix .. 'tenants', tenant)
  if is_first_still and next_tenant and (num_expired_of[tenant] or 0) >= MAX_EXPIRED_OF_ONE then
    num_passed_over = num_passed_over + 1
  end
end

local ids, ids_and_leases = {}, {}
for i, job in ipairs(claimed) do ids[i], ids_and_leases[i] = job.id, job.id .. ' ' .. job.lease end
if #ids > 0 then redis.call('SADD', leases, unpack(ids)) end
is_full = is_full or alone or #claimed >= asked_jobs
redis.call('HSET', heartbeat, 'claim', claim_id, 'claimed', table.concat(ids_and_leases, ' '), 'takes_until',
  is_full and 0 or now + TAKES_JOBS_MS)
if alone then redis.call('HSET', heartbeat, 'alone', alone) end
local num_left = is_queue_paused and 0 or num_queued
if num_left == 0 then redis.call('DEL', prefix .. 'wake') elseif #claimed > 0 or max_jobs <= 0 then wake(1) end
return reply_with(num_left, num_set_aside, claimed)
