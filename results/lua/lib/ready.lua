-- The members of ready:<tenant>.

-- Members of one priority sort by age: 16 digits of the serial, a colon, the id.
local function ready_member(id, serial)
  return string.format('%016d:', tonumber(serial) or 0) .. id
end
