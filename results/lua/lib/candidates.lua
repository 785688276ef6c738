-- The candidates of a job: the texts that its prompt yields. The keys and fields of a candidate's output end with its suffix: ""
-- for the only candidate of a job, ":<index>" for one of several.
-- include: settings

local MAX_CANDIDATES = 64

-- The suffixes of all candidates. `n` is that field of the record; a job with one candidate has none.
local function suffixes(n)
  if not n then return {''} end
  local found = {}
  for index = 0, math.min(whole_number(n, 1), MAX_CANDIDATES) - 1 do found[index + 1] = ':' .. index end
  return found
end
