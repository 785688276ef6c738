-- Keeps output of a running job, and publishes an event of it: running -> running. Safe to repeat.
-- ARGV  1 job id, 2 lease, 3 fingerprint of the engine's model, then for each candidate with new output 10 values: "" for the
--       only candidate of a job, ":<index>" for one of several, offset of the first token, tokens (4 bytes each); of its
--       event the offset, the number of tokens, the token ids (JSON), the text; where log-probabilities are wanted, those
--       of the tokens (a line of JSON each) and of the event (a JSON list); and what the event adds to the parts of a chat
--       (JSON). What does not apply is "", or left out at the end
-- Returns "ok" or "stale" (the lease is not, or no longer, the job's; or the server has lost earlier output)
-- include: queue settings record lease output

-- What an event of a chat adds to its parts. `fields` are those of its entry, `from` is the number of the first one that may be it.
local function chat_in(fields, from)
  for i = from, #fields, 2 do
    if fields[i] == 'chat' then return fields[i + 1] end
  end
end

-- Keeps the parts that are in trimmed events, a line of JSON each. An event without them is content, as is all that was trimmed
-- before the first event with them.
local function keep_parts(name, texts, chats)
  local key, lines = prefix .. 'chat:' .. name, {}
  if redis.call('STRLEN', key) == 0 then
    if not next(chats) then return end
    local text = redis.call('GET', prefix .. 'text:' .. name)
    if text then lines[1] = cjson.encode({content = text}) end
  end
  for i, text in ipairs(texts) do lines[#lines + 1] = chats[i] or cjson.encode({content = text}) end
  redis.call('APPEND', key, table.concat(lines, '\n') .. '\n')
end

-- A long stream loses its older half: the text of each candidate moves to text:<id>, and the parts of a chat to chat:<id>; the
-- token ids and the log-probabilities are in the checkpoints already.
local function trim_stream(id)
  local key = prefix .. 'result:' .. id
  local max_events = setting('max_events', 8192)
  local num_events = redis.call('XLEN', key)
  if num_events <= max_events then return end
  local num_kept = math.floor(max_events / 2)
  local trimmed, num_tokens, last_id = {}, 0, nil  -- by suffix
  for _, entry in ipairs(redis.call('XRANGE', key, '-', '+', 'COUNT', num_events - num_kept)) do
    -- offset, its value, count, its value, tokens, their value, text, its value; then with several candidates: index, its
    -- value, position, its value; then maybe logprobs and chat
    local fields = entry[2]
    local is_one_of_several = fields[9] == 'index'
    local suffix = is_one_of_several and ':' .. fields[10] or ''
    local part = trimmed[suffix] or {texts = {}, chats = {}}
    part.texts[#part.texts + 1], part.num_tokens = fields[8], fields[2] + fields[4]
    part.chats[#part.texts] = chat_in(fields, is_one_of_several and 13 or 9)
    trimmed[suffix], last_id, num_tokens = part, entry[1], fields[is_one_of_several and 12 or 2] + fields[4]
  end
  redis.call('XTRIM', key, 'MAXLEN', num_kept)
  local job = prefix .. 'job:' .. id
  redis.call('HSET', job, 'trimmed', num_tokens, 'trimmed_id', last_id)
  for suffix, part in pairs(trimmed) do
    keep_parts(id .. suffix, part.texts, part.chats)
    redis.call('APPEND', prefix .. 'text:' .. id .. suffix, table.concat(part.texts))
    if suffix ~= '' then redis.call('HSET', job, 'trimmed' .. suffix, part.num_tokens) end
  end
end

allow_writes_without_memory()
local id, lease = ARGV[1], ARGV[2]
local state, _, fingerprint = lease_state(id, lease)
if state ~= 'owned' then return refuse_stale_write() end
if fingerprint ~= ARGV[3] then redis.call('HSET', prefix .. 'job:' .. id, 'fingerprint', ARGV[3]) end
local published
for i = 4, #ARGV, 10 do
  local suffix, event_offset = ARGV[i], tonumber(ARGV[i + 3])
  local num_known = extend_checkpoint(id, suffix, tonumber(ARGV[i + 1]), ARGV[i + 2], ARGV[i + 7])
  if not num_known then return refuse_stale_write() end
  if event_offset then
    if event_offset + ARGV[i + 4] > num_known then
      return redis.error_reply('ERR the event shows tokens that the checkpoint does not hold')
    end
    published = published or record(id, 'published')[1]
    local changes
    published, changes =
      publish(id, published, suffix, event_offset, ARGV[i + 4], ARGV[i + 5], ARGV[i + 6], ARGV[i + 8], ARGV[i + 9])
    if not published then return refuse_stale_write() end
    if changes then redis.call('HSET', prefix .. 'job:' .. id, unpack(changes)) end
  end
end
if published then trim_stream(id) end
return 'ok'
