-- The server's clock. Times are in milliseconds since the epoch.

local clock = redis.call('TIME')  -- seconds, microseconds
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
