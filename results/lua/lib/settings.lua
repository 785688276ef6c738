-- The queue's settings, and numbers that somebody else may have written.
-- include: queue

-- A value as a whole number; the default where it is not one.
local function whole_number(value, default)
  local number = value and tonumber(value)
  return number and number >= 0 and number < 2 ^ 53 and math.floor(number) or default
end

local function setting(name, default)
  return whole_number(redis.call('HGET', prefix .. 'settings', name), default)
end
