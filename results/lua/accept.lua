-- Turns an inbox entry into a job: nothing -> queued, or delayed. The first engine that calls it gets the entry.
-- KEYS  1 the queue's prefix
-- ARGV  1 id of the inbox entry, 2 the error to keep if the id belongs to another job (JSON),
--       3..11 the job as in submit: id, digest, body, cost, seed, tenant, priority, "1" when streamed or "", options or ""
-- Returns "created", "exists", "conflict" (the entry is now in `rejected`), "full <limit> <value>" (the entry stays in the
--       inbox: try again later), "oversized <limit> <value>" or "invalid <field>" (it stays: reject it) or "taken" (another
--       engine had the entry; where a limit is reached too, the answer is the limit)
-- include: queue new_job rejected

local job = {unpack(ARGV, 3, 11)}
job[10] = ARGV[1]
local outcome = create_job(unpack(job, 1, 10))
local is_known = outcome == 'exists' or outcome == 'conflict'
if is_known and redis.call('XDEL', prefix .. 'inbox', ARGV[1]) == 0 then return 'taken' end
enqueue_created()
if outcome == 'conflict' then add_rejected(ARGV[3], ARGV[5], ARGV[2]) end
return outcome
