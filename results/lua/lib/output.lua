-- The output of a running job: the checkpoint and the events of each candidate. `suffix` is "" for the only candidate of a job,
-- ":<index>" for one of several; keys and fields end with it.
-- include: queue settings

-- The lines behind the first `count` ones.
local function skip_lines(lines, count)
  local at = 0
  for _ = 1, count do at = string.find(lines, '\n', at + 1, true) or #lines end
  return string.sub(lines, at + 1)
end

-- Appends the tokens (4 bytes each) that the checkpoint does not hold yet, and their log-probabilities (a line each, "" or nil
-- without any). Returns its length in tokens. nil when there is a gap: the server has lost an earlier write, and the writer knows
-- more than the record.
local function extend_checkpoint(id, suffix, offset, tokens, logprobs)
  local key = prefix .. 'tokens:' .. id .. suffix
  local num_known = redis.call('STRLEN', key) / 4
  if offset > num_known then return nil end
  local has_logprobs = logprobs and logprobs ~= ''
  if offset < num_known then
    tokens = string.sub(tokens, (num_known - offset) * 4 + 1)
    if has_logprobs then logprobs = skip_lines(logprobs, num_known - offset) end
  end
  if #tokens == 0 then return num_known end
  if has_logprobs then redis.call('APPEND', prefix .. 'logprobs:' .. id .. suffix, logprobs) end
  return redis.call('APPEND', key, tokens) / 4
end

-- Publishes an event once: an event that starts before the candidate's published tokens is known already. `published` is that
-- field of the record, the tokens of all candidates in events. `logprobs` and `chat`, what the event adds to the parts of a chat,
-- are "" or nil without any. Returns the new value of `published`, nil when the event would leave a gap; then the fields of the
-- record that the caller has to set, with their values, nil where there are none.
local function publish(id, published, suffix, offset, num_tokens, token_ids, text, logprobs, chat)
  published = whole_number(published, 0)
  local own = suffix == '' and published
    or whole_number(redis.call('HGET', prefix .. 'job:' .. id, 'published' .. suffix), 0)
  if offset > own then return nil end
  if offset < own then return published end
  local more = logprobs and logprobs ~= '' and {'logprobs', logprobs} or {}
  if chat and chat ~= '' then more[#more + 1], more[#more + 2] = 'chat', chat end
  if suffix == '' then
    redis.call('XADD', prefix .. 'result:' .. id, '*', 'offset', offset, 'count', num_tokens, 'tokens', token_ids,
      'text', text, unpack(more))
    return offset + num_tokens, {'published', offset + num_tokens}
  end
  redis.call('XADD', prefix .. 'result:' .. id, '*', 'offset', offset, 'count', num_tokens, 'tokens', token_ids,
    'text', text, 'index', string.sub(suffix, 2), 'position', published, unpack(more))
  return published + num_tokens, {'published', published + num_tokens, 'published' .. suffix, offset + num_tokens}
end
