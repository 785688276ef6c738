-- Takes an inbox entry in as a job: nothing -> queued, or delayed. Only the first engine to come gets the entry.
-- KEYS  1 the queue's prefix
-- ARGV  1 id of the inbox entry, 2 why it is rejected if the job's id belongs to another job (JSON),
--       3..11 the job as in submit: id, digest, body, cost, seed, tenant, priority, "1" when streamed or "", options or ""
-- Returns "created", "exists", "conflict" (the entry went to `rejected`), "full <limit> <value>" (the entry stays in the
--       inbox: try again later), "oversized <limit> <value>" or "invalid <field>" (it stays: reject it) or "taken" (another
--       engine had the entry)

local entry_id = ARGV[1]
if #redis.call('XRANGE', prefix .. 'inbox', entry_id, entry_id) == 0 then return 'taken' end
local outcome = create_job(unpack(ARGV, 3, 11))
if find(outcome, ' ', 1, true) then return outcome end  -- those with something to say
redis.call('XDEL', prefix .. 'inbox', entry_id)
line_up()
if outcome == 'conflict' then add_rejected(ARGV[3], ARGV[5], ARGV[2]) end
return outcome
