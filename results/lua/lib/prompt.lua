-- How the prompt of a job begins.
-- include: queue

-- A digest of the first bytes of a job's prompt, as JSON, and of its cache salt; nil where its body is short. It is a hint: equal
-- prompts have equal digests when their clients write JSON in one way. engine_service/serving/prefixes.py computes the same one.
local function prompt_digest(id)
  local MAX_BODY, NUM_BYTES = 1024, 256
  local body = redis.call('GETRANGE', prefix .. 'body:' .. id, 0, MAX_BODY - 1)
  local _, key_end = string.find(body, '"prompt":', 1, true)
  if not key_end then _, key_end = string.find(body, '"messages":', 1, true) end
  if not key_end then _, key_end = string.find(body, '"prompt_token_ids":', 1, true) end
  if not key_end or #body < key_end + NUM_BYTES then return nil end
  local salt = string.match(body, '^{"cache_salt":"[^"]*"') or ''
  return redis.sha1hex(salt .. string.sub(body, key_end + 1, key_end + NUM_BYTES))
end
