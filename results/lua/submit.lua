-- Submits new jobs: nothing -> queued, or delayed. Safe to repeat.
-- ARGV  for each job 9 values: id, digest, body, cost, seed, tenant, priority, "1" when streamed or "", options or ""
--       The digest, 64 digits, may end with "-" and the 8 hexadecimal digits of how the prompt begins.
--       The options are a JSON object with any of: delay_ms, run_at_ms, deadline_ms (from now), max_retries, meta (the
--       text of a JSON object), batch, n
-- Returns for each job "created", "exists" (the same body is known under the id), "conflict" (another body is) or
--       "full <limit> <value>" (not taken: the queue, or the tenant's part of it, is at that limit), "oversized <limit>
--       <value>" (not taken: its cost alone exceeds that limit) or "invalid <field>" (not taken: no job can have that
--       argument or option; deadline_ms also where it passes before the job may begin)
-- include: serial new_job

if #ARGV % 9 ~= 0 then return redis.error_reply('ERR each job needs 9 values, got ' .. #ARGV .. ' in all') end
local outcomes = {}
reserve_serials(#ARGV / 9)
for first = 1, #ARGV, 9 do
  outcomes[#outcomes + 1] = create_job(unpack(ARGV, first, first + 8))
end
enqueue_created()
return outcomes
