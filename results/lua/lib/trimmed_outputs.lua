-- The part of the output that was trimmed from a job's stream, by candidate.
-- include: queue record candidates

-- The text and the tokens (4 bytes each) of each candidate, one after the other; "" where nothing was trimmed. Then the
-- log-probabilities of all tokens in the checkpoint of each candidate, a line of JSON each; nil where none has any. `trimmed` and
-- `n` are those fields of the record.
local function trimmed_outputs(id, trimmed, n)
  local outputs, logprobs, has_logprobs = {}, {}, false
  for _, suffix in ipairs(suffixes(n)) do
    local name, num_tokens = id .. suffix, trimmed
    if n and trimmed then num_tokens = record(id, 'trimmed' .. suffix)[1] end  -- `trimmed` counts those of all
    outputs[#outputs + 1] = num_tokens and redis.call('GET', prefix .. 'text:' .. name) or ''
    outputs[#outputs + 1] = num_tokens and redis.call('GETRANGE', prefix .. 'tokens:' .. name, 0, num_tokens * 4 - 1) or ''
    logprobs[#logprobs + 1] = num_tokens and redis.call('GET', prefix .. 'logprobs:' .. name) or ''
    has_logprobs = has_logprobs or logprobs[#logprobs] ~= ''
  end
  return outputs, has_logprobs and logprobs or nil
end
