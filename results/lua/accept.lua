-- Turns an inbox entry into a job: nothing -> queued, or delayed. The first engine that calls it gets the entry.
-- ARGV  1 id of the inbox entry,
--       2..10 the job as in submit: id, digest, body, cost, seed, tenant, priority, "1" when streamed or "", options or ""
-- Returns "created", "exists", "full <limit> <value>" (the entry stays in the inbox: try again later), "conflict" (another job
--       has the id), "oversized <limit> <value>" or "invalid <field>" (it stays: reject it) or "taken" (another engine had
--       the entry; where a limit is reached too, the answer is the limit)
-- include: queue new_job

local job = {unpack(ARGV, 2, 10)}
job[10] = ARGV[1]
local outcome = create_job(unpack(job, 1, 10))
if outcome == 'exists' and redis.call('XDEL', prefix .. 'inbox', ARGV[1]) == 0 then return 'taken' end
enqueue_created()
return outcome
