-- The ready jobs: one sorted set for each tenant.
-- include: queue

-- Members of one priority sort by age: 16 digits of the serial, a colon, the id.
local function ready_member(id, serial)
  return string.format('%016d:', tonumber(serial) or 0) .. id
end

local function id_of_member(member)
  return string.sub(member, 18)
end

local function num_ready()
  return tonumber(redis.call('HGET', prefix .. 'counts', 'queued') or 0)
end
