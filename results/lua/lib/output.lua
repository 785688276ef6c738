-- The output of a running job: its checkpoint and its events.
-- include: queue settings

-- Appends the tokens (4 bytes each) that the checkpoint does not hold yet, and returns its length in tokens. nil when there is
-- a gap: the server has lost an earlier write, and the writer knows more than the record.
local function extend_checkpoint(id, offset, tokens)
  local key = prefix .. 'tokens:' .. id
  local num_known = redis.call('STRLEN', key) / 4
  if offset > num_known then return nil end
  local new_tokens = string.sub(tokens, (num_known - offset) * 4 + 1)
  if #new_tokens == 0 then return num_known end
  return redis.call('APPEND', key, new_tokens) / 4
end

-- Publishes an event once: an event that starts before `published` is known already. False when it would leave a gap.
local function publish(id, published, offset, num_tokens, token_ids, text)
  published = whole_number(published, 0)
  if offset > published then return false end
  if offset < published then return true end
  redis.call('XADD', prefix .. 'result:' .. id, '*', 'offset', offset, 'count', num_tokens, 'tokens', token_ids,
    'text', text)
  redis.call('HSET', prefix .. 'job:' .. id, 'published', offset + num_tokens)
  return true
end
