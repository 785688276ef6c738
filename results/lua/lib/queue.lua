-- The queue's prefix. KEYS[1] is "millrace:{queue}:". Every key is that prefix with a name appended (keys.py has the legend),
-- so all keys have the same hash tag and live in the cluster slot that KEYS[1] names.

local prefix = KEYS[1]
local PROTOCOL = '1'  -- the version of new records

-- Out of memory, Redis refuses the first write of a script, but no later one. Accepted jobs must be able to continue and end,
-- so every script, except those that take new jobs, starts with a write that is always allowed. The bare prefix is no key.
local function allow_writes_without_memory()
  redis.call('DEL', prefix)
end
