-- Ends a running job: running -> finished, failed, cancelled or expired; or, when the failure is retryable and retries
-- are left, running -> delayed, with its checkpoint. Safe to repeat.
-- ARGV  1 job id, 2 lease, 3 state, 4 finish reason; with several candidates also that of each one, separated by spaces,
--       5 prompt tokens, 6 completion tokens, 7 cached tokens, 8 the error (JSON) or "", 9 "1" when the failure is
--       retryable or "", 10 how many ms ago the first token came or "", 11 the log-probabilities of the prompt (JSON) or "",
--       12 of each candidate the stop string or stop token at which it ended, or null (JSON list), or "" for none,
--       then for each candidate with output to show 7 values: "" for the only candidate of a job, ":<index>" for one of
--       several, offset, number of tokens, token ids (JSON), text, log-probabilities (JSON) or "", what it adds to the parts of
--       a chat (JSON) or ""; the last candidate may leave out the last two
-- Returns "ok", "already" (this lease has ended the job before), "retrying" (it waits for its next attempt) or "stale" (the
--       lease is not, or no longer, the job's)
-- include: queue clock settings record lease fair_share output end_job

local DEFAULT_RETRIES = 2

-- Twice as long after each failure, minus a part that differs between jobs that failed together: at most one half.
local function backoff_ms(num_retries, lease)
  local full_ms = math.min(setting('retry_base_ms', 1000) * 2 ^ num_retries, setting('retry_max_ms', 60000))
  local share = (clock[2] + tonumber(string.sub(lease, -6)) * 7919) % 1000 / 1000
  return math.max(1, math.floor(full_ms * (0.5 + 0.5 * share)))
end

allow_writes_without_memory()
local id, lease, state = ARGV[1], ARGV[2], ARGV[3]
local fields = record(id, 'lease', 'engine', 'retries', 'max_retries', 'cancel', 'expire', unpack(END_FIELDS))
local owner_lease, engine, retries, max_retries, cancel, expire = unpack(fields)
local known = {unpack(fields, 7)}
local published, from, tenant, cost = known[1], known[3], known[7], known[8]
if owner_lease ~= lease then return refuse_stale_write() end
if from ~= 'running' then return 'already' end

if state == 'failed' and ARGV[9] == '1' then
  -- include: give_back
  if cancel or expire then  -- there is no next attempt
    give_back(id, engine, 0)
    return 'ok'
  end
  local num_retries = whole_number(retries, 0)
  if num_retries < whole_number(max_retries, DEFAULT_RETRIES) then
    redis.call('HSET', prefix .. 'job:' .. id, 'retries', num_retries + 1)
    give_back(id, engine, backoff_ms(num_retries, lease))
    return 'retrying'
  end
end
for i = 13, #ARGV > 19 and #ARGV or 0, 7 do  -- of several events none is written when one would leave a gap
  local own = record(id, 'published' .. ARGV[i])[1]
  if tonumber(ARGV[i + 1]) > whole_number(own, 0) then return refuse_stale_write() end
end
for i = 13, #ARGV, 7 do
  known[1], known.changes =
    publish(id, known[1], ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5], ARGV[i + 6])
  if not known[1] then return refuse_stale_write() end
  if known.changes and i + 6 < #ARGV then redis.call('HSET', prefix .. 'job:' .. id, unpack(known.changes)) end
end
redis.call('SREM', prefix .. 'leases:' .. engine, id)
known.settings = redis.call('HMGET', prefix .. 'settings', 'result_ttl_ms', 'record_ttl_ms', 'weight:' .. tenant)
charge(tenant, ARGV[5] + ARGV[6] - whole_number(cost, 0), valid_weight(known.settings[3]))
redis.call('HINCRBY', prefix .. 'counts', 'generated_tokens', ARGV[6])
local details = {'prompt_tokens', ARGV[5], 'completion_tokens', ARGV[6], 'cached_tokens', ARGV[7]}
if ARGV[8] ~= '' then details[#details + 1], details[#details + 2] = 'error', ARGV[8] end
if ARGV[10] ~= '' then details[#details + 1], details[#details + 2] = 'first_token', now - ARGV[10] end
if ARGV[11] ~= '' then details[#details + 1], details[#details + 2] = 'prompt_logprobs', ARGV[11] end
local reason, space = ARGV[4], string.find(ARGV[4], ' ', 1, true)
if space then
  details[#details + 1], details[#details + 2] = 'reasons', string.sub(reason, space + 1)
  reason = string.sub(reason, 1, space - 1)
end
if ARGV[12] ~= '' then details[#details + 1], details[#details + 2] = 'stop_reasons', ARGV[12] end
end_job(id, state, reason, known, unpack(details))
return 'ok'
