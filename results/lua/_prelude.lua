-- What the scripts share. scripts.py puts what a script uses of this file in front of it, paragraph by paragraph.
--
-- KEYS[1] is the queue's prefix, "millrace:{queue}:". Every key is that prefix with something appended (keys.py has the
-- legend), so all of them have its hash tag and live in the slot of a cluster that KEYS[1] names.
-- Times are milliseconds of the server's clock.

local prefix = KEYS[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local PROTOCOL = '1'
local MAX_WAKE_TOKENS = 64
local MAX_DONE_ENTRIES = 100000
local MAX_REJECTED_ENTRIES = 1000
local MAX_SWEPT = 256  -- jobs that one call looks at whose time has come

-- What an operator has set, as a whole number; the default where it is nothing of that kind.
local function whole_number(value, default)
  local number = tonumber(value)
  return number and number >= 0 and number < 2 ^ 53 and math.floor(number) or default
end

-- A setting of this queue, in its `settings` hash.
local function setting(name, default)
  return whole_number(redis.call('HGET', prefix .. 'settings', name), default)
end

-- Out of memory, Redis refuses the first write of a script, and never a later one. What was accepted must be able to go
-- on and end, so all scripts but those that take jobs in start with a write that is always allowed: nothing lives under
-- the bare prefix.
local function go_on_when_out_of_memory()
  redis.call('DEL', prefix)
end

-- The next of the numbers that order jobs by age and leases by time. It never comes back, not even when the server has
-- lost its last writes or all of them: it is at least the time in microseconds.
-- One call reserves as many as it may need; those that it leaves are never used.
local last_serial, num_reserved = 0, 0
local function reserve_serials(count)
  local key = prefix .. 'serial'
  last_serial = math.max(tonumber(redis.call('GET', key) or 0), clock[1] * 1000000 + clock[2])
  num_reserved = count
  redis.call('SET', key, string.format('%d', last_serial + count))
end

local function next_serial()
  if num_reserved == 0 then reserve_serials(1) end
  last_serial, num_reserved = last_serial + 1, num_reserved - 1
  return string.format('%d', last_serial)
end

-- The fields of a job's record; false for each one that is not there.
local function record(id, ...)
  return redis.call('HMGET', prefix .. 'job:' .. id, ...)
end

-- The fence. 'owned', 'ended' (by this very lease) or 'stale'; the owner's engine id comes second.
local function standing(id, lease)
  local fields = record(id, 'lease', 'state', 'engine')
  if fields[1] ~= lease then return 'stale' end
  if fields[2] == 'running' then return 'owned', fields[3] end
  return 'ended'
end

-- What a write gets whose lease is not, or no longer, the job's.
local function refuse_stale_write()
  redis.call('HINCRBY', prefix .. 'counts', 'stale_writes', 1)
  return 'stale'
end

-- Tells up to num_jobs idle engines that there is work.
local function wake(num_jobs)
  local key = prefix .. 'wake'
  local num_tokens = math.min(num_jobs, MAX_WAKE_TOKENS - redis.call('LLEN', key))
  for _ = 1, num_tokens do redis.call('RPUSH', key, '1') end
end

-- A word to the engine that owns a job.
local function signal(engine, word, id)
  local key = prefix .. 'signals:' .. engine
  redis.call('RPUSH', key, word .. ' ' .. id)
  redis.call('LTRIM', key, -1000, -1)
  redis.call('PEXPIRE', key, 60000)
end

-- Whether somebody reads a job live: from the start (the record's `stream`), or now.
local function is_watched(id, is_streamed)
  return is_streamed == '1' or redis.call('EXISTS', prefix .. 'watched:' .. id) == 1
end

-- --- the ready jobs of the tenants ---------------------------------------------------------------------------------

-- Within one priority members sort by age: 16 digits of the serial, a colon, the id.
local function ready_member(id, serial)
  return string.format('%016d:', serial) .. id
end

local function id_of_member(member)
  return string.sub(member, 18)
end

-- Makes the tenant one of those that have ready jobs. One that arrives starts level with the least served, or where it
-- has been already while these waited.
local function activate_tenant(tenant)
  local key, away = prefix .. 'tenants', prefix .. 'away'
  if redis.call('ZSCORE', key, tenant) then return end
  local least_time = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2] or 0)
  redis.call('ZADD', key, math.max(least_time, redis.call('ZSCORE', away, tenant) or least_time), tenant)
  redis.call('ZREM', away, tenant)
  redis.call('ZREMRANGEBYSCORE', away, '-inf', least_time)
end

-- The tenant has no ready jobs any more. Its virtual time is kept while others wait; with nobody left all begin anew.
local function deactivate_tenant(tenant)
  local key, away = prefix .. 'tenants', prefix .. 'away'
  local time = redis.call('ZSCORE', key, tenant)
  redis.call('ZREM', key, tenant)
  if redis.call('EXISTS', key) == 0 then
    redis.call('DEL', away)
    redis.call('HSET', prefix .. 'counts', 'queued', 0)
  elseif time then
    redis.call('ZADD', away, time, tenant)
  end
end

local function add_ready(id, tenant, priority, serial)
  activate_tenant(tenant)
  redis.call('ZADD', prefix .. 'ready:' .. tenant, priority, ready_member(id, serial))
  redis.call('HINCRBY', prefix .. 'counts', 'queued', 1)
end

-- Books that ready jobs of a tenant have gone.
local function count_removed(tenant, num_jobs)
  redis.call('HINCRBY', prefix .. 'counts', 'queued', 0 - num_jobs)  -- Redis 6.2 takes no "-0", which -num_jobs may be
  if redis.call('EXISTS', prefix .. 'ready:' .. tenant) == 0 then deactivate_tenant(tenant) end
end

local function remove_ready(tenant, member)
  if redis.call('ZREM', prefix .. 'ready:' .. tenant, member) == 1 then count_removed(tenant, 1) end
end

local function num_ready()
  return tonumber(redis.call('HGET', prefix .. 'counts', 'queued') or 0)
end

local function is_paused()
  return redis.call('HGET', prefix .. 'settings', 'paused') == '1'
end

-- What waits, queued or delayed: the jobs of each tenant, what they cost, and what all of them cost.
local function count_waiting(tenant, num_jobs, num_tokens)
  local key = prefix .. 'waiting'
  redis.call('HINCRBY', key, ':tokens', num_tokens)
  redis.call('HINCRBY', key, tenant .. ':tokens', num_tokens)
  if redis.call('HINCRBY', key, tenant .. ':jobs', num_jobs) > 0 then return end
  redis.call('HDEL', key, tenant .. ':jobs', tenant .. ':tokens')
  if redis.call('HLEN', key) == 1 then redis.call('DEL', key) end  -- only the sum is left
end

-- Fair share: a claim charges a job's cost to its tenant, giving the job back refunds it, its end settles the difference.
-- A tenant with twice the weight pays half, so it gets twice the tokens.
local MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e6  -- virtual times stay numbers that can be added
local function weight_of(tenant)
  local weight = tonumber(redis.call('HGET', prefix .. 'settings', 'weight:' .. tenant))
  return weight and weight >= MIN_WEIGHT and weight <= MAX_WEIGHT and weight or 1
end

local function charge(tenant, num_tokens)
  local time = num_tokens / weight_of(tenant)
  if not redis.call('ZADD', prefix .. 'tenants', 'XX', 'INCR', time, tenant) then
    redis.call('ZADD', prefix .. 'away', 'XX', 'INCR', time, tenant)
  end
end

-- --- state and batch -----------------------------------------------------------------------------------------------

-- A batch counts its jobs by state, so the state of one changes here. `from` is false for a new job; `...` are more fields
-- of the record.
local function set_state(id, batch, from, to, ...)
  redis.call('HSET', prefix .. 'job:' .. id, 'state', to, ...)
  if not batch then return end
  local key = prefix .. 'batch:' .. batch
  if from then redis.call('HINCRBY', key, from, -1) end
  redis.call('HINCRBY', key, to, 1)
end

-- A batch lives as long as the records of its jobs, from the end of the last one on.
local function close_batch(batch, keep_ms)
  local key = prefix .. 'batch:' .. batch
  for _, count in ipairs(redis.call('HMGET', key, 'queued', 'delayed', 'running')) do
    if tonumber(count or 0) > 0 then return end
  end
  redis.call('PEXPIRE', key, keep_ms)
  redis.call('PEXPIRE', prefix .. 'members:' .. batch, keep_ms)
end

-- --- a new job -----------------------------------------------------------------------------------------------------

local function create_record(id, digest, serial, ...)
  redis.call('HSET', prefix .. 'job:' .. id, 'v', PROTOCOL, 'digest', digest, 'serial', serial, 'created', now, ...)
end

-- By tenant, what this call has created: the jobs, what they cost, and those ready at once as arguments of ZADD. One call
-- brings many jobs of few tenants, so they are counted and lined up together, by `line_up`.
local arrived = {}
local function arrivals_of(tenant)
  arrived[tenant] = arrived[tenant] or {num_jobs = 0, num_tokens = 0, ready = {}}
  return arrived[tenant]
end

-- Anything in any language may call `submit`, and what is written by half can't be taken back: so all is looked at before.
local find = string.find
local NAME, DIGITS = '^[A-Za-z0-9._-]+$', '^-?%d+$'
local function is_name(text, max_bytes)
  return #text <= max_bytes and find(text, NAME) ~= nil
end

-- The first limit of this queue that one more job would break: "full <setting> <value>", or "oversized <setting> <value>"
-- where the job would break it in an empty queue too. nil where there is room.
local limits
local function limit_reached(tenant, cost)
  limits = limits or redis.call('HMGET', prefix .. 'settings', 'max_queued_jobs', 'max_queued_tokens',
    'tenant_max_queued_jobs', 'tenant_max_queued_tokens')
  if not (limits[1] or limits[2] or limits[3] or limits[4]) then return nil end
  local waiting = redis.call('HMGET', prefix .. 'waiting', ':tokens', tenant .. ':jobs', tenant .. ':tokens')
  local num_jobs = num_ready() + redis.call('ZCARD', prefix .. 'delayed')
  local own, num_ready_too, num_tokens = arrivals_of(tenant), 0, 0  -- what this call has created, and not yet lined up
  for _, arrivals in pairs(arrived) do
    num_ready_too, num_tokens = num_ready_too + #arrivals.ready / 2, num_tokens + arrivals.num_tokens
  end
  local would_be = {num_jobs + num_ready_too + 1, (waiting[1] or 0) + num_tokens + cost,
    (waiting[2] or 0) + own.num_jobs + 1, (waiting[3] or 0) + own.num_tokens + cost}
  for i, name in ipairs({'max_queued_jobs', 'max_queued_tokens', 'tenant_max_queued_jobs', 'tenant_max_queued_tokens'}) do
    local limit = tonumber(limits[i] or nil)
    if limit and would_be[i] > limit then
      local is_hopeless = find(name, 'tokens') and tonumber(cost) > limit
      return (is_hopeless and 'oversized ' or 'full ') .. name .. ' ' .. limits[i]
    end
  end
end

-- The first of a job's arguments that no job can have; nil where there is none. The numbers have to be plain digits, since
-- they are read as integers elsewhere; those of one tenant in one call mostly have one priority.
local MAX_COST_DIGITS = 12  -- the sum over a queue must stay within 64 bits
local good_tenant, good_priority
local function wrong_argument(id, cost, seed, tenant, priority)
  if not is_name(id, 128) then return 'id' end
  if #cost > MAX_COST_DIGITS or not find(cost, '^%d+$') then return 'cost' end
  if not find(seed, DIGITS) then return 'seed' end
  if #seed > 18 then  -- more than a Lua number holds, so digits are compared
    local largest = find(seed, '-', 1, true) and '-9223372036854775808' or '9223372036854775807'
    if #seed > #largest or #seed == #largest and seed > largest then return 'seed' end
  end
  if tenant ~= good_tenant then
    if not is_name(tenant, 64) then return 'tenant' end
    good_tenant = tenant
  end
  if priority ~= good_priority then
    local number = find(priority, DIGITS) and tonumber(priority)
    if not number or number < -2147483648 or number > 2147483647 then return 'priority' end
    good_priority = priority
  end
end

-- The options as a table, with `due`, when the job may begin; nil, then what is wrong with them. A null is an option that is
-- not given. All that they need is in here, since most jobs have none.
local NO_OPTIONS = {}
local function read_options(text)
  if text == '' then return NO_OPTIONS end
  local is_json, options = pcall(cjson.decode, text)
  if not is_json or type(options) ~= 'table' then return nil, 'options' end
  for name, value in pairs(options) do
    if value == cjson.null then options[name] = nil end
  end
  local ranges = {delay_ms = {0, 1e13}, run_at_ms = {0, 1e13}, deadline_ms = {1, 1e13}, max_retries = {0, 100}}
  for name, range in pairs(ranges) do
    local value = options[name]
    local is_integer = type(value) == 'number' and value % 1 == 0
    if value ~= nil and not (is_integer and value >= range[1] and value <= range[2]) then return nil, name end
  end
  local meta, batch = options.meta, options.batch
  if meta ~= nil then
    local is_object = type(meta) == 'string' and #meta <= 16384 and find(meta, '^%s*{')
    if not (is_object and pcall(cjson.decode, meta)) then return nil, 'meta' end
  end
  if batch ~= nil and not (type(batch) == 'string' and is_name(batch, 64)) then return nil, 'batch' end
  options.due = options.run_at_ms or now + (options.delay_ms or 0)
  if options.deadline_ms and options.due >= now + options.deadline_ms then return nil, 'deadline_ms' end
  return options
end

-- The options of a new job into its record and its batch. Returns whether it is delayed.
local function apply_options(id, options)
  local key, due, batch = prefix .. 'job:' .. id, options.due, options.batch
  if options.deadline_ms then
    redis.call('HSET', key, 'deadline', now + options.deadline_ms)
    redis.call('ZADD', prefix .. 'deadlines', now + options.deadline_ms, id)
  end
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
  if due > now then redis.call('ZADD', prefix .. 'delayed', due, id) end
  set_state(id, batch, false, due > now and 'delayed' or 'queued')
  return due > now
end

-- nil -> queued, or delayed. 'created', 'exists' (the same job is known), 'conflict' (the id belongs to another one),
-- 'full ...', 'oversized ...', or 'invalid <field>'. The caller ends with `line_up`.
local function create_job(id, digest, body, cost, seed, tenant, priority, is_streamed, options_json)
  local known = redis.call('HGET', prefix .. 'job:' .. id, 'digest')
  if known then return known == digest and 'exists' or 'conflict' end
  local wrong = wrong_argument(id, cost, seed, tenant, priority)
  if wrong then return 'invalid ' .. wrong end
  local options, wrong_one = read_options(options_json)
  if not options then return 'invalid ' .. wrong_one end
  local refusal = limit_reached(tenant, cost)
  if refusal then return refusal end
  local serial = next_serial()
  create_record(id, digest, serial, 'tenant', tenant, 'priority', priority, 'cost', cost, 'seed', seed,
    'stream', is_streamed, 'state', 'queued')
  redis.call('SET', prefix .. 'body:' .. id, body)
  local is_delayed = options ~= NO_OPTIONS and apply_options(id, options)
  local arrivals = arrivals_of(tenant)
  arrivals.num_jobs, arrivals.num_tokens = arrivals.num_jobs + 1, arrivals.num_tokens + cost
  if not is_delayed then
    local ready = arrivals.ready
    ready[#ready + 1], ready[#ready + 2] = priority, ready_member(id, serial)
  end
  return 'created'
end

-- Lines up what `create_job` has created, and wakes engines for it.
local MAX_ARGUMENTS = 4000
local function line_up()
  local num_queued = 0
  for tenant, arrivals in pairs(arrived) do
    local ready = arrivals.ready
    if #ready > 0 then activate_tenant(tenant) end
    for first = 1, #ready, MAX_ARGUMENTS do
      redis.call('ZADD', prefix .. 'ready:' .. tenant, unpack(ready, first, math.min(first + MAX_ARGUMENTS - 1, #ready)))
    end
    num_queued = num_queued + #ready / 2
    if arrivals.num_jobs > 0 then count_waiting(tenant, arrivals.num_jobs, arrivals.num_tokens) end
  end
  if num_queued == 0 then return end
  redis.call('HINCRBY', prefix .. 'counts', 'queued', num_queued)
  wake(num_queued)
end

local function add_rejected(id, raw, error)
  redis.call('XADD', prefix .. 'rejected', 'MAXLEN', '~', MAX_REJECTED_ENTRIES, '*', 'id', id, 'raw', raw, 'error', error)
end

-- --- output --------------------------------------------------------------------------------------------------------

-- Grows the checkpoint by those of the tokens (4 bytes each) that it does not hold yet, and returns its length in tokens.
-- nil when there is a gap: the server has lost an earlier write, and the writer knows more than the record.
local function extend_checkpoint(id, offset, tokens)
  local key = prefix .. 'tokens:' .. id
  local num_known = redis.call('STRLEN', key) / 4
  if offset > num_known then return nil end
  local fresh = string.sub(tokens, (num_known - offset) * 4 + 1)
  if #fresh == 0 then return num_known end
  return redis.call('APPEND', key, fresh) / 4
end

-- A long stream loses its older half: the text goes to text:<id>, the token ids are in the checkpoint already.
local function bound_stream(id)
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

-- Shows an event, once: one that starts before what is published has been shown. False when it would leave a gap.
local function publish(id, published, offset, num_tokens, token_ids, text)
  published = whole_number(published, 0)
  if offset > published then return false end
  if offset < published then return true end
  redis.call('XADD', prefix .. 'result:' .. id, '*', 'offset', offset, 'count', num_tokens, 'tokens', token_ids,
    'text', text)
  redis.call('HSET', prefix .. 'job:' .. id, 'published', offset + num_tokens)
  return true
end

-- --- ends and returns ----------------------------------------------------------------------------------------------

-- What `end_job` has to know of a record.
local END_FIELDS = {'published', 'trimmed', 'state', 'batch', 'deadline', 'meta', 'tenant', 'cost', 'fingerprint'}

-- Any state -> a terminal one. The caller has taken the job out of ready, delayed or leases. `known` are the END_FIELDS
-- where the caller has read them, else nil; `...` are more fields of the terminal entry: prompt_tokens and
-- completion_tokens, error.
local function end_job(id, state, reason, known, ...)
  local published, trimmed, from, batch, deadline, meta, tenant, cost, fingerprint =
    unpack(known or record(id, unpack(END_FIELDS)))
  local times = redis.call('HMGET', prefix .. 'settings', 'result_ttl_ms', 'record_ttl_ms')
  local keep_ms = whole_number(times[1], 86400000)
  local record_ms = math.max(keep_ms, whole_number(times[2], keep_ms))
  redis.call('XADD', prefix .. 'result:' .. id, '*', 'state', state, 'reason', reason, 'offset', published or 0, ...)
  set_state(id, batch, from, state, 'ended', now)
  redis.call('PEXPIRE', prefix .. 'job:' .. id, record_ms)
  redis.call('PEXPIRE', prefix .. 'body:' .. id, record_ms)
  redis.call('PEXPIRE', prefix .. 'result:' .. id, keep_ms)
  if trimmed then  -- the oldest part of the output is not in the stream
    redis.call('PEXPIRE', prefix .. 'tokens:' .. id, keep_ms)
    redis.call('PEXPIRE', prefix .. 'text:' .. id, keep_ms)
  elseif fingerprint then  -- written with the first tokens: without one there is no checkpoint
    redis.call('DEL', prefix .. 'tokens:' .. id)
  end
  if meta then redis.call('PEXPIRE', prefix .. 'meta:' .. id, record_ms) end
  if deadline then redis.call('ZREM', prefix .. 'deadlines', id) end
  if batch then close_batch(batch, record_ms) end
  if from == 'queued' or from == 'delayed' then count_waiting(tenant, -1, 0 - whole_number(cost, 0)) end
  redis.call('XADD', prefix .. 'done', 'MAXLEN', '~', MAX_DONE_ENTRIES, '*', 'id', id, 'state', state)
  redis.call('HINCRBY', prefix .. 'counts', state, 1)
  if state == 'failed' then
    redis.call('ZREMRANGEBYSCORE', prefix .. 'dead', '-inf', now - record_ms)
    redis.call('ZADD', prefix .. 'dead', now, id)
  end
end

-- running -> queued at its old age, so in front; delayed when it has to wait; cancelled when somebody has asked for that;
-- expired when its deadline has passed.
local function give_back(id, engine, delay_ms)
  redis.call('SREM', prefix .. 'leases:' .. engine, id)
  local tenant, priority, serial, cost, cancel, deadline, batch =
    unpack(record(id, 'tenant', 'priority', 'serial', 'cost', 'cancel', 'deadline', 'batch'))
  if not tenant then return end  -- the record is gone: somebody has deleted it
  redis.call('HDEL', prefix .. 'job:' .. id, 'lease', 'engine', 'base', 'unbegun')
  if cancel then return end_job(id, 'cancelled', 'cancelled') end
  if deadline and tonumber(deadline) <= now then return end_job(id, 'expired', 'expired') end
  cost = whole_number(cost, 0)
  charge(tenant, 0 - cost)
  count_waiting(tenant, 1, cost)
  if delay_ms > 0 then
    set_state(id, batch, 'running', 'delayed')
    redis.call('ZADD', prefix .. 'delayed', now + delay_ms, id)
  else
    set_state(id, batch, 'running', 'queued')
    add_ready(id, tenant, priority, serial)
  end
end

-- The same for a job whose engine is well: the attempt does not count.
local function give_back_unharmed(id, engine, delay_ms)
  give_back(id, engine, delay_ms)
  if record(id, 'attempt')[1] then redis.call('HINCRBY', prefix .. 'job:' .. id, 'attempt', -1) end
end

-- --- estimates -----------------------------------------------------------------------------------------------------

-- Real throughput: completions in a millisecond, over the last of them. nil where nothing has been completed lately.
-- MAX_PAGES: many that never began may have ended in between.
local MAX_COMPLETIONS, MAX_PAGES = 500, 10
local function jobs_per_ms()
  local oldest, latest = now - 600000, '+'
  local num_completed, earliest = 0, nil
  for _ = 1, MAX_PAGES do
    local entries = redis.call('XREVRANGE', prefix .. 'done', latest, oldest, 'COUNT', MAX_COMPLETIONS)
    for _, entry in ipairs(entries) do
      local state = entry[2][4]
      if num_completed < MAX_COMPLETIONS and (state == 'finished' or state == 'failed') then
        num_completed, earliest = num_completed + 1, entry
      end
    end
    if #entries < MAX_COMPLETIONS or num_completed == MAX_COMPLETIONS then break end
    latest = '(' .. entries[#entries][1]
  end
  if not earliest then return nil end
  local span = now - tonumber(string.match(earliest[1], '^%d+'))
  local started, ended = unpack(record(earliest[2][2], 'started', 'ended'))  -- nil where the record has expired
  -- An engine may end many jobs in one moment: where they are all that there is, that took as long as the earliest ran.
  if num_completed < MAX_COMPLETIONS and started and ended then span = math.max(span, ended - started) end
  return num_completed / math.max(1, span)
end

-- A tenant's line: its jobs, what one of them costs on average, its virtual time and its weight.
local function line_of(tenant, time)
  local waiting = redis.call('HMGET', prefix .. 'waiting', tenant .. ':jobs', tenant .. ':tokens')
  local num_jobs, num_tokens = tonumber(waiting[1] or 0), tonumber(waiting[2] or 0)
  return {num_jobs = redis.call('ZCARD', prefix .. 'ready:' .. tenant), time = tonumber(time),
    job_cost = num_jobs > 0 and math.max(1, num_tokens / num_jobs) or 1, weight = weight_of(tenant)}
end

-- How many jobs are likely to begin before a queued one. Fair share serves the other tenants until they are where this one
-- will be when the job's turn comes.
local MAX_TENANTS = 64  -- that the estimate looks at
local function count_ahead(id, tenant, serial)
  local rank = redis.call('ZRANK', prefix .. 'ready:' .. tenant, ready_member(id, serial)) or 0
  local own = line_of(tenant, redis.call('ZSCORE', prefix .. 'tenants', tenant) or 0)
  local turn = own.time + rank * own.job_cost / own.weight
  local tenants = redis.call('ZRANGE', prefix .. 'tenants', 0, MAX_TENANTS - 1, 'WITHSCORES')
  local num_ahead = rank
  for i = 1, #tenants, 2 do
    if tenants[i] ~= tenant then
      local other = line_of(tenants[i], tenants[i + 1])
      local num_served = math.ceil(math.max(0, turn - other.time) * other.weight / other.job_cost)
      num_ahead = num_ahead + math.min(other.num_jobs, num_served)
    end
  end
  return num_ahead
end

-- --- what time brings ----------------------------------------------------------------------------------------------

-- delayed -> queued, for jobs whose time has come.
local function promote_due()
  local key = prefix .. 'delayed'
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, MAX_SWEPT)) do
    redis.call('ZREM', key, id)
    local tenant, priority, serial, batch = unpack(record(id, 'tenant', 'priority', 'serial', 'batch'))
    if tenant then
      set_state(id, batch, 'delayed', 'queued')
      add_ready(id, tenant, priority, serial)
    end
  end
end

-- queued, delayed -> expired, for jobs whose deadline has passed; the engine of a running one is told, which then ends it.
local function expire_due()
  local key = prefix .. 'deadlines'
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, MAX_SWEPT)) do
    redis.call('ZREM', key, id)
    local state, tenant, serial, engine = unpack(record(id, 'state', 'tenant', 'serial', 'engine'))
    if state == 'running' then
      redis.call('HSET', prefix .. 'job:' .. id, 'expire', '1')
      signal(engine, 'expire', id)
    elseif state == 'queued' then
      remove_ready(tenant, ready_member(id, serial))
      end_job(id, 'expired', 'expired')
    elseif state == 'delayed' then
      redis.call('ZREM', prefix .. 'delayed', id)
      end_job(id, 'expired', 'expired')
    end
  end
end
