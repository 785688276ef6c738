-- Serial numbers: they order jobs by age, and leases by time.
-- include: queue clock

-- A serial number is at least the time in microseconds, so it never repeats, even when the server has lost its last writes
-- or all of them. One call reserves as many as it may need; it never uses the rest.
local last_serial, num_reserved = 0, 0
local function reserve_serials(count)
  local key = prefix .. 'serial'
  last_serial, num_reserved = clock[1] * 1000000 + clock[2], count
  local known = tonumber(redis.call('SET', key, string.format('%d', last_serial + count), 'GET') or 0)
  if known <= last_serial then return end
  last_serial = known
  redis.call('SET', key, string.format('%d', last_serial + count))
end

local function next_number()
  if num_reserved == 0 then reserve_serials(1) end
  last_serial, num_reserved = last_serial + 1, num_reserved - 1
  return last_serial
end

local function next_serial()
  return string.format('%d', next_number())
end
