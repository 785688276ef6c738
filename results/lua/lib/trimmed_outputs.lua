-- The part of the output that was trimmed from a job's stream, by candidate.
-- include: queue record candidates

-- For each candidate an array: the text, the tokens (4 bytes each), the log-probabilities of all tokens in its checkpoint, a line
-- of JSON each, and the parts of a chat, as its events had them, a line of JSON each; "" where there is none, or nothing was
-- trimmed. `trimmed` and `n` are those fields of the record.
local function trimmed_outputs(id, trimmed, n)
  local outputs = {}
  for i, suffix in ipairs(suffixes(n)) do
    local name, num_tokens = id .. suffix, trimmed
    if n and trimmed then num_tokens = record(id, 'trimmed' .. suffix)[1] end  -- `trimmed` counts those of all
    outputs[i] = {'', '', '', ''}
    if num_tokens then
      outputs[i] = {redis.call('GET', prefix .. 'text:' .. name) or '',
        redis.call('GETRANGE', prefix .. 'tokens:' .. name, 0, num_tokens * 4 - 1),
        redis.call('GET', prefix .. 'logprobs:' .. name) or '', redis.call('GET', prefix .. 'chat:' .. name) or ''}
    end
  end
  return outputs
end
