-- The checkpoints of a job, together.
-- include: queue candidates

-- The tokens in the checkpoints of all candidates; `n` is that field of the record.
local function num_checkpointed(id, n)
  local num_bytes = 0
  for _, suffix in ipairs(suffixes(n)) do
    num_bytes = num_bytes + redis.call('STRLEN', prefix .. 'tokens:' .. id .. suffix)
  end
  return num_bytes / 4
end
