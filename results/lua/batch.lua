-- Counts the jobs of a batch. No transition.
-- KEYS  1 the queue's prefix
-- ARGV  1 the batch
-- Returns nil (unknown) or an array: created ms, queued, delayed, running, finished, failed, cancelled, expired, and the
--       milliseconds until all of it has ended at the pace of the last completions, -1 where that is not known

local key = prefix .. 'batch:' .. ARGV[1]
if redis.call('EXISTS', key) == 0 then return false end
local names = {'created', 'queued', 'delayed', 'running', 'finished', 'failed', 'cancelled', 'expired'}
local reply = {}
for i, count in ipairs(redis.call('HMGET', key, unpack(names))) do reply[i] = tonumber(count or 0) end
local num_open = reply[2] + reply[3] + reply[4]
local pace = num_open > 0 and jobs_per_ms()
reply[9] = num_open == 0 and 0 or pace and not is_paused() and math.ceil(num_open / pace) or -1
return reply
