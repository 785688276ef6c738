-- Submits the body of a failed, expired or cancelled job as a new job, <id>.r<n>: nothing -> queued. Both records name each
-- other. Safe to repeat: a job is redriven once; its redrive may be redriven in turn.
-- ARGV  1 job id
-- Returns nil (unknown) or an array: "created" and the new id; "exists" and the id of the earlier redrive; "refused" and
--       the job's state; "no body" and "" when there is no valid request; "no id" and "" when the new id would be too long
-- include: queue record limits new_job

local MAX_ID = 128

local function next_id(id, is_redrive)
  local root, number = id, 1
  if is_redrive then
    local stem, last = string.match(id, '^(.*)%.r(%d+)$')
    if stem then root, number = stem, last + 1 end
  end
  while redis.call('EXISTS', prefix .. 'job:' .. root .. '.r' .. number) == 1 do number = number + 1 end
  return root .. '.r' .. number
end

local id = ARGV[1]
local f = record(id, 'state', 'digest', 'cost', 'seed', 'tenant', 'priority', 'stream', 'redrive_of', 'redriven_as',
  'created', 'deadline', 'max_retries', 'batch', 'v', 'n', 'serial')
local state = f[1]
if not state then return false end
if f[9] then
  redis.call('ZREM', prefix .. 'dead', id)
  return {'exists', f[9]}
end
if state ~= 'failed' and state ~= 'expired' and state ~= 'cancelled' then return {'refused', state} end
local body = redis.call('GET', prefix .. 'body:' .. id)
if not body or not f[5] then return {'no body', ''} end
local new_id = next_id(id, f[8])
if #new_id > MAX_ID then return {'no id', ''} end

local options = {n = tonumber(f[15] or nil), meta = redis.call('GET', prefix .. 'meta:' .. id) or nil, batch = f[13] or nil,
  max_retries = tonumber(f[12] or nil), deadline_ms = f[11] and f[11] - f[10] or nil}
created_of(f[5]).limits = {}  -- none apply: the job was in the queue before
local has_options = next(options) ~= nil
local digest = f[2] .. (string.match(f[16] or '', '%-%x+$') or '')
local outcome = create_job(new_id, digest, body, f[3], f[4], f[5], f[6], f[7], has_options and cjson.encode(options) or '')
if outcome ~= 'created' then return {'no body', ''} end
redis.call('HSET', prefix .. 'job:' .. new_id, 'redrive_of', id, 'v', f[14] or PROTOCOL)  -- the body keeps its version
redis.call('HSET', prefix .. 'job:' .. id, 'redriven_as', new_id)
if f[13] then redis.call('HINCRBY', prefix .. 'batch:' .. f[13], 'redriven', 1) end
redis.call('ZREM', prefix .. 'dead', id)
enqueue_created()
return {'created', new_id}
