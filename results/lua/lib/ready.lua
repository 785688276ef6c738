-- The members of ready:<tenant>.

-- Members of one priority sort by age: 16 digits of the number in the serial, a colon, the 8 digits of how the prompt begins, a
-- colon, the id. So a claim needs no record to know how the prompts of the first jobs begin.
local NO_BEGINNING = '--------'

local function new_member(id, number, beginning)
  return (#number == 16 and number or string.format('%016d', number)) .. ':' .. beginning .. ':' .. id
end

local function ready_member(id, serial)
  serial = serial or ''
  local number, beginning = string.match(serial, '^(%d+)%-(%x%x%x%x%x%x%x%x)$')
  return new_member(id, number or string.match(serial, '^%d+$') or '0', beginning or NO_BEGINNING)
end
