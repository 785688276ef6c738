-- Lists jobs in a state: those next in line, or those that run. The ends are in `done`, and in `dead`. No transition.
-- ARGV  1 state: queued, delayed or running, 2 most ids, 1 .. 10,000
-- Returns an array of job ids; there may be more
-- include: queue dequeue

local state, limit = ARGV[1], tonumber(ARGV[2])
if not limit or limit < 1 or limit > 10000 or limit % 1 ~= 0 then
  return redis.error_reply('ERR limit: must be an integer from 1 to 10000')
end
local ids, is_listed = {}, {}
local function add(id)
  if #ids == limit or is_listed[id] then return end
  ids[#ids + 1], is_listed[id] = id, true
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
  return redis.error_reply('ERR state: must be queued, delayed or running')
end
return ids
