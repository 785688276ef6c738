-- New jobs: nothing -> queued, or delayed.
-- include: queue clock serial work ready enqueue state signals arguments limits

-- Adds a job to `delayed` or `deadlines`. Where it is the first one and due before an engine would look, one looks now, and then
-- at its time. Engines look every quarter of the heartbeat limit, which is hardly longer than a minute.
local function add_due(name, at, id)
  local key = prefix .. name
  redis.call('ZADD', key, at, id)
  if at - now > 15000 or redis.call('ZRANGE', key, 0, 0)[1] ~= id then return end
  local engine = redis.call('ZRANGE', prefix .. 'engines', -1, -1)[1]
  if engine then signal(engine, 'beat', 'now') end
end

-- Writes the options of a new job into its record and its batch. Returns whether the job is delayed.
local function apply_options(id, options)
  local key, due, batch = prefix .. 'job:' .. id, options.due, options.batch
  if options.deadline_ms then
    redis.call('HSET', key, 'deadline', now + options.deadline_ms)
    add_due('deadlines', now + options.deadline_ms, id)
  end
  if (options.n or 1) > 1 then redis.call('HSET', key, 'n', options.n) end
  if options.max_retries then redis.call('HSET', key, 'max_retries', options.max_retries) end
  if options.meta then
    redis.call('HSET', key, 'meta', '1')
    redis.call('SET', prefix .. 'meta:' .. id, options.meta)
  end
  if batch then
    redis.call('HSET', key, 'batch', batch)
    redis.call('HSETNX', prefix .. 'batch:' .. batch, 'created', now)
    redis.call('RPUSH', prefix .. 'members:' .. batch, id)
    redis.call('PERSIST', prefix .. 'batch:' .. batch)
    redis.call('PERSIST', prefix .. 'members:' .. batch)
  end
  if due > now then add_due('delayed', due, id) end
  set_state(id, batch, false, due > now and 'delayed' or 'queued')
  return due > now
end

-- Creates a job. `digest` may end with `-` and the 8 digits of how the prompt begins, which become a part of the serial.
-- Returns 'created', 'exists' (the same job is known), 'conflict' (the id belongs to another one), 'full ...',
-- 'oversized ...', or 'invalid <field>'. The caller ends with `enqueue_created`. A job of an inbox entry has its `entry_id`, and
-- removes the entry; the job is 'taken' where the entry is gone.
local function create_job(id, digest, body, cost, seed, tenant, priority, is_streamed, options_json, entry_id)
  local beginning = #digest == 73 and string.match(digest, '^%-(%x%x%x%x%x%x%x%x)$', 65)
  if beginning then digest = string.sub(digest, 1, 64) end
  local key = prefix .. 'job:' .. id
  local known = redis.call('HGET', key, 'digest')
  if known then return known == digest and 'exists' or 'conflict' end
  local invalid = invalid_argument(id, cost, seed, tenant, priority)
  if invalid then return 'invalid ' .. invalid end
  local options, invalid_option = read_options(options_json)
  if not options then return 'invalid ' .. invalid_option end
  local refusal = limit_reached(tenant, cost)
  if refusal then return refusal end
  local serial = next_serial()  -- first: the one write that is refused without memory
  -- XDEL shows whether the entry is there; XRANGE would copy it.
  if entry_id and redis.call('XDEL', prefix .. 'inbox', entry_id) == 0 then return 'taken' end
  redis.call('HSET', key, 'v', PROTOCOL, 'digest', digest,
    'serial', beginning and serial .. '-' .. beginning or serial, 'created', now,
    'tenant', tenant, 'priority', priority, 'cost', cost, 'seed', seed, 'stream', is_streamed, 'state', 'queued')
  redis.call('SET', prefix .. 'body:' .. id, body)
  local is_delayed = options ~= NO_OPTIONS and apply_options(id, options)
  local jobs = created_of(tenant)
  jobs.num_jobs, jobs.num_tokens = jobs.num_jobs + 1, jobs.num_tokens + cost
  if not is_delayed then
    local ready = jobs.ready
    ready[#ready + 1], ready[#ready + 2] = priority, new_member(id, serial, beginning or NO_BEGINNING)
  end
  return 'created'
end

-- Adds the jobs that `create_job` has created to the ready sets, and wakes engines for them.
local MAX_ARGUMENTS = 4000
local function enqueue_created()
  local num_queued = 0
  for tenant, jobs in pairs(created) do
    local ready = jobs.ready
    if #ready > 0 then activate_tenant(tenant) end
    for first = 1, #ready, MAX_ARGUMENTS do
      redis.call('ZADD', prefix .. 'ready:' .. tenant, unpack(ready, first, math.min(first + MAX_ARGUMENTS - 1, #ready)))
    end
    num_queued = num_queued + #ready / 2
    if jobs.num_jobs > 0 then count_waiting(tenant, jobs.num_jobs, jobs.num_tokens) end
  end
  if num_queued == 0 then return end
  redis.call('HINCRBY', prefix .. 'counts', 'queued', num_queued)
  wake(num_queued)
end
