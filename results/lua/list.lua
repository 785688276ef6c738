-- Lists jobs in a state: those next in line, those that run, or those that ended last, of the last 10,000 at least. No
-- transition.
-- KEYS  1 the queue's prefix
-- ARGV  1 state, 2 most ids, from 1 on
-- Returns an array of job ids; there may be more
-- include: queue dequeue

local state, limit = ARGV[1], tonumber(ARGV[2])
if not limit or limit < 1 or limit % 1 ~= 0 then
  return redis.error_reply('ERR limit: must be an integer from 1 on')
end
local ids, is_listed = {}, {}
local function add(id)
  if #ids == limit or is_listed[id] then return end
  ids[#ids + 1], is_listed[id] = id, true
end

local function add_known(id)
  if redis.call('EXISTS', prefix .. 'job:' .. id) == 1 then add(id) end
end

if state == 'queued' then
  for _, tenant in ipairs(redis.call('ZRANGE', prefix .. 'tenants', 0, limit - 1)) do
    local members = redis.call('ZRANGE', prefix .. 'ready:' .. tenant, 0, limit - 1 - #ids)
    for _, member in ipairs(members) do add(id_of_member(member)) end
    if #ids >= limit then break end
  end
elseif state == 'delayed' then
  return redis.call('ZRANGE', prefix .. 'delayed', 0, limit - 1)
elseif state == 'running' then
  for _, engine in ipairs(redis.call('ZRANGE', prefix .. 'engines', 0, -1)) do
    for _, id in ipairs(redis.call('SRANDMEMBER', prefix .. 'leases:' .. engine, limit)) do add(id) end
  end
else
  if state == 'failed' then  -- `dead` reaches further back than `done`, but has no redriven jobs
    for _, id in ipairs(redis.call('ZRANGE', prefix .. 'dead', 0, limit - 1, 'REV')) do add_known(id) end
  end
  local before, left = '+', math.max(limit, 10000)  -- of the jobs that ended last, whatever their state
  while left > 0 and #ids < limit do
    local entries = redis.call('XREVRANGE', prefix .. 'done', before, '-', 'COUNT', math.min(left, 1000))
    if #entries == 0 then break end
    for _, entry in ipairs(entries) do
      if entry[2][4] == state then add_known(entry[2][2]) end
    end
    before, left = '(' .. entries[#entries][1], left - #entries
  end
end
return ids
