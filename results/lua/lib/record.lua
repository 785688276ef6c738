-- A job's record.
-- include: queue

-- Fields of a job's record; false for each one that does not exist.
local function record(id, ...)
  return redis.call('HMGET', prefix .. 'job:' .. id, ...)
end
