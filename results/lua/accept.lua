-- Turns an inbox entry into a job: nothing -> queued, or delayed. The first engine that calls it gets the entry.
-- KEYS  1 the queue's prefix
-- ARGV  1 id of the inbox entry, 2 the error to keep if the id belongs to another job (JSON),
--       3..11 the job as in submit: id, digest, body, cost, seed, tenant, priority, "1" when streamed or "", options or ""
-- Returns "created", "exists", "conflict" (the entry is now in `rejected`), "full <limit> <value>" (the entry stays in the
--       inbox: try again later), "oversized <limit> <value>" or "invalid <field>" (it stays: reject it) or "taken" (another
--       engine had the entry)
-- include: queue new_job rejected

local entry_id = ARGV[1]
if #redis.call('XRANGE', prefix .. 'inbox', entry_id, entry_id) == 0 then return 'taken' end
local outcome = create_job(unpack(ARGV, 3, 11))
if string.find(outcome, ' ', 1, true) then return outcome end  -- full, oversized, invalid
redis.call('XDEL', prefix .. 'inbox', entry_id)
enqueue_created()
if outcome == 'conflict' then add_rejected(ARGV[3], ARGV[5], ARGV[2]) end
return outcome
