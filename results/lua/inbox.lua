-- Reads inbox entries, with a bound in bytes. No transition.
-- ARGV  1 id to read after ("0-0" for all), 2 most entries, 3 most bytes (the entry that exceeds them is the last one),
--       4 bytes of the longest body that is sent
-- Returns for each entry an array: id, bytes of its field `job`, that field; of a longer one only the first 4,096 bytes
-- include: queue

local after, max_entries, max_bytes, max_body = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local entries, num_bytes = {}, 0
while #entries < max_entries and num_bytes < max_bytes do
  local entry = redis.call('XRANGE', prefix .. 'inbox', '(' .. after, '+', 'COUNT', 1)[1]
  if not entry then break end
  local body, fields = '', entry[2]
  for i = 1, #fields, 2 do
    num_bytes = num_bytes + #fields[i + 1]
    if fields[i] == 'job' then body = fields[i + 1] end
  end
  after = entry[1]
  entries[#entries + 1] = {after, #body, #body > max_body and string.sub(body, 1, 4096) or body}
end
return entries
