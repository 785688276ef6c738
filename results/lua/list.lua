-- Names some jobs in a state: those next in line, those that run, or those that ended last. No transition.
-- KEYS  1 the queue's prefix
-- ARGV  1 state, 2 most jobs to name
-- Returns an array of job ids; there may be more

local state, limit = ARGV[1], tonumber(ARGV[2])
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
  if state == 'failed' then  -- the dead letters; what has been redriven is in `done` alone, which reaches less far back
    for _, id in ipairs(redis.call('ZRANGE', prefix .. 'dead', 0, limit - 1, 'REV')) do add_known(id) end
  end
  for _, entry in ipairs(redis.call('XREVRANGE', prefix .. 'done', '+', '-', 'COUNT', math.min(limit * 20, 20000))) do
    if entry[2][4] == state then add_known(entry[2][2]) end
  end
end
return ids
