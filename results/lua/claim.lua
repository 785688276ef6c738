-- Gives ready jobs to an engine: queued -> running. The tenant with the least virtual time comes first; within a tenant
-- priority, then age, but among the first jobs of one priority those with a cached prompt go first. The claim stops at the first
-- job that it may not take, so that a large job is not passed over again and again. Jobs that nobody can run now, after their deadline or of another model, are set aside; after a claim that only did
-- that, claim again. In a paused queue a claim takes nothing.
-- KEYS  1 the queue's prefix
-- ARGV  1 engine id, 2 claim id (repeating it returns the same jobs), 3 most jobs, 4 KV budget in tokens,
--       5 fingerprint of the engine's model, 6 jobs that the engine holds already, 7 "1" when the engine calls `begin`
--       before it computes a job that runs alone (may be omitted), 8 digests of the beginnings of prompts that the engine has
--       cached, 8 hexadecimal digits each, separated by spaces (may be omitted), 9 "1" to leave to other engines that can take
--       jobs their part of the ready ones (may be omitted)
-- Returns nil when the engine's heartbeat has expired, else an array: jobs still ready (0 while the queue is paused), jobs set
--       aside, then for each job an array: id, lease, attempt, body, seed, cost, crashes, checkpoint (4 bytes a token),
--       tokens published, 1 when watched or 0, created ms, the record's protocol version, tenant, priority, then for each
--       candidate from the second on its checkpoint and its tokens published
-- Also: delayed jobs that are due -> queued; queued, delayed -> expired after their deadline; queued -> delayed, and
--       later failed, where the output is another model's
-- include: queue clock settings serial record lease work candidates checkpoints signals dequeue fair_share state end_job due engine_share

allow_writes_without_memory()
local engine, claim_id, max_jobs, budget = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local fingerprint, is_idle, calls_begin = ARGV[5], ARGV[6] == '0', ARGV[7] == '1'
local heartbeat = prefix .. 'engine:' .. engine
local leases = prefix .. 'leases:' .. engine

local ALONE_FROM = 2  -- crashes without progress
local MAX_SET_ASIDE = 256  -- jobs that one claim sets aside,
local MAX_EXPIRED_OF_ONE = 16  -- and those of one tenant whose deadline has passed, when other tenants wait
local MAX_READ_AHEAD = 4  -- jobs of one tenant, when other tenants wait

-- A fingerprint is written with the first tokens: without one there is no checkpoint to read. `fields` has what only the reply
-- needs: with more than 16 names the table takes twice the memory, and a claim of many jobs 13 % more time.
local function read_job(id)
  local f = record(id, 'tenant', 'cost', 'crashes', 'fingerprint', 'published', 'attempt', 'seed', 'created', 'stream',
    'started', 'batch', 'v', 'deadline', 'n', 'priority')
  return {id = id, tenant = f[1], cost = whole_number(f[2], 0), crashes = whole_number(f[3], 0),
    fingerprint = f[4], published = whole_number(f[5], 0), attempt = whole_number(f[6], 0), stream = f[9],
    started = f[10], batch = f[11], deadline = tonumber(f[13] or nil), n = f[14], priority = f[15], fields = f,
    tokens = f[4] and redis.call('GET', prefix .. 'tokens:' .. id) or ''}
end

local function describe(job, lease)
  local f = job.fields  -- 7 is the seed, 8 created, 12 the protocol's version
  local reply = {job.id, lease, job.attempt, redis.call('GET', prefix .. 'body:' .. job.id), f[7], job.cost, job.crashes,
    job.tokens, job.published, is_watched(job.id, job.stream) and 1 or 0, f[8], f[12], job.tenant, job.priority}
  if not job.n then return reply end
  for i, suffix in ipairs(suffixes(job.n)) do
    local at = i == 1 and 8 or #reply + 1
    reply[at] = redis.call('GET', prefix .. 'tokens:' .. job.id .. suffix) or ''
    reply[at + 1] = whole_number(record(job.id, 'published' .. suffix)[1], 0)
  end
  return reply
end

local function repeat_claim(claimed)
  local jobs = {num_ready(), 0}
  for id, lease in string.gmatch(claimed, '(%S+) (%S+)') do
    if lease_state(id, lease) == 'owned' then jobs[#jobs + 1] = describe(read_job(id), lease) end
  end
  return jobs
end

-- From 1 ms to a second, by chance. Idle engines claim once a second, in an order that hardly changes: if the delay were always
-- a second too, the engine that cannot continue the job would be the first to claim it each time.
local function set_aside_ms()
  return 2 ^ (clock[2] % 11)
end

-- A checkpoint of another model is dropped while nobody has seen any of it; otherwise the job waits for an engine that can
-- continue it.
local function fits_this_model(job)
  if not job.fingerprint or job.fingerprint == fingerprint then return true end
  local key = prefix .. 'job:' .. job.id
  if job.published == 0 then
    for _, suffix in ipairs(suffixes(job.n)) do redis.call('DEL', prefix .. 'tokens:' .. job.id .. suffix) end
    redis.call('HDEL', key, 'fingerprint')
    job.tokens = ''
    return true
  end
  redis.call('HSETNX', key, 'mismatch', now)
  if now - whole_number(redis.call('HGET', key, 'mismatch'), 0) < setting('mismatch_wait_ms', 600000) then
    set_state(job.id, job.batch, 'queued', 'delayed')
    redis.call('ZADD', prefix .. 'delayed', now + set_aside_ms(), job.id)
  else
    end_job(job.id, 'failed', 'error', nil, 'error', '{"kind":"fingerprint_mismatch","message":"the output so far is of '
      .. 'another model, tokenizer or dtype than this queue\'s engines have; submit the job again under a new id"}')
  end
  return false
end

local function must_be_alone(job)
  return job.crashes >= ALONE_FROM
end

local function take(job)
  local lease = next_serial()
  job.attempt = job.attempt + 1
  set_state(job.id, job.batch, 'queued', 'running', 'lease', lease, 'engine', engine, 'base',
    job.n and num_checkpointed(job.id, job.n) or #job.tokens / 4,
    'attempt', job.attempt, 'started', job.started or now)
  if calls_begin and must_be_alone(job) then redis.call('HSET', prefix .. 'job:' .. job.id, 'unbegun', lease) end
  if job.fingerprint then redis.call('HDEL', prefix .. 'job:' .. job.id, 'mismatch') end
  redis.call('SADD', leases, job.id)
  return lease
end

local jobs, claimed, alone = {0, 0}, {}, nil
local num_set_aside, num_expired_of = 0, {}  -- in all; by tenant, of those that have ended

local function may_take(job)
  local can_be_alone = is_idle and #claimed == 0
  return can_be_alone or not must_be_alone(job) and job.cost <= budget
end

-- Takes the job, or sets it aside; returns what its tenant is charged.
local function take_or_set_aside(job, tenant)
  local is_gone = not job.tenant  -- somebody has deleted the record
  local is_expired = is_gone or job.deadline and job.deadline <= now  -- `expire_due` has a limit
  if not is_expired and fits_this_model(job) then
    local lease = take(job)
    jobs[#jobs + 1] = describe(job, lease)
    claimed[#claimed + 1] = job.id .. ' ' .. lease
    budget = budget - job.cost
    if must_be_alone(job) then alone = job.id end
    return job.cost
  end
  num_set_aside = num_set_aside + 1
  if is_expired then num_expired_of[tenant] = (num_expired_of[tenant] or 0) + 1 end
  if is_gone then count_waiting(tenant, -1, 0) elseif is_expired then end_job(job.id, 'expired', 'expired') end
  return 0
end

-- Where the engine has cached prompts: one of the next jobs of a tenant goes first if its prompt is cached and that of the first
-- one is not.
local MAX_LOOKAHEAD, MAX_PASSED_OVER = 16, 16  -- jobs that are looked at; jobs that may pass over one first job
local cached = ARGV[8] ~= '' and ARGV[8]

local function has_cached_prompt(member)
  return string.find(cached, beginning_of_member(member), 1, true)
end

-- Returns a function that returns the job to take at members[at], for increasing `at`. A job that passes over others is moved
-- there, and its member is added to `ahead`. Only a first job that the claim may take is passed over.
local function cached_first(members, ahead)
  local first, num_seen = {}, 0  -- members[num_seen] and those before it pass over no other job any more
  return function(at)
    local id = id_of_member(members[at])
    if first.id ~= id then first = read_job(id) end
    if alone or not first.tenant or has_cached_prompt(members[at]) or not may_take(first) then return first end
    for i = math.max(at, num_seen) + 1, math.min(at + MAX_LOOKAHEAD - 1, #members) do
      if has_cached_prompt(members[i]) then
        local job = read_job(id_of_member(members[i]))
        first.num_passed_over = first.num_passed_over or whole_number(record(id, 'passed_over')[1], 0)
        if job.priority ~= first.priority or first.num_passed_over >= MAX_PASSED_OVER then break end
        if job.cost <= budget and not must_be_alone(job) then
          first.num_passed_over = first.num_passed_over + 1
          redis.call('HSET', prefix .. 'job:' .. id, 'passed_over', first.num_passed_over)
          ahead[#ahead + 1] = members[i]
          table.insert(members, at, table.remove(members, i))
          num_seen = i
          return job
        end
      end
      num_seen = i
    end
    return first
  end
end

-- Takes the first jobs of one tenant while it has the least virtual time; returns whether the claim may continue.
local function serve(tenant, time, next_time)
  local most = max_jobs - #claimed
  if next_time then most = math.min(most, MAX_READ_AHEAD) end
  local key, weight = prefix .. 'ready:' .. tenant, weight_of(tenant)
  local num_passed, num_before, cost, may_continue, ahead = 0, #claimed, 0, true, {}
  local members = redis.call('ZRANGE', key, 0, most - 1 + (cached and MAX_LOOKAHEAD - 1 or 0))
  local next_job = cached and cached_first(members, ahead)
  for at = 1, math.min(most, #members) do
    if num_passed > 0 and next_time and time + cost / weight >= next_time then break end
    local job = next_job and next_job(at) or read_job(id_of_member(members[at]))
    may_continue = may_take(job) and not alone
    if not may_continue then break end
    num_passed = num_passed + 1
    cost = cost + take_or_set_aside(job, tenant)
  end
  if #claimed > num_before then
    count_waiting(tenant, num_before - #claimed, 0 - cost)
    charge(tenant, cost)
  end
  if #ahead > 0 then redis.call('ZREM', key, unpack(ahead)) end
  if num_passed > #ahead then redis.call('ZREMRANGEBYRANK', key, 0, num_passed - #ahead - 1) end
  count_removed(tenant, num_passed)  -- also where somebody has deleted the set
  return may_continue
end

if redis.call('EXISTS', heartbeat) == 0 then return false end
local previous = redis.call('HMGET', heartbeat, 'claim', 'claimed', 'alone')
if previous[1] == claim_id then return repeat_claim(previous[2]) end
local runs_alone = previous[3] and redis.call('SISMEMBER', leases, previous[3]) == 1

expire_due()
promote_due()
local is_queue_paused = is_paused()
local asked_jobs, is_full = max_jobs, runs_alone
if ARGV[9] == '1' and num_ready() > 0 then max_jobs = engine_share(engine, max_jobs) end
local may_continue = not runs_alone and not is_queue_paused and num_ready() > 0 and max_jobs > 0
if may_continue then reserve_serials(math.min(max_jobs, num_ready())) end
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

is_full = is_full or alone or #claimed >= asked_jobs
redis.call('HSET', heartbeat, 'claim', claim_id, 'claimed', table.concat(claimed, ' '), 'takes_until',
  is_full and 0 or now + TAKES_JOBS_MS)
if alone then redis.call('HSET', heartbeat, 'alone', alone) end
jobs[1], jobs[2] = is_queue_paused and 0 or num_ready(), num_set_aside
if jobs[1] == 0 then redis.call('DEL', prefix .. 'wake') elseif #claimed > 0 or max_jobs <= 0 then wake(1) end
return jobs
