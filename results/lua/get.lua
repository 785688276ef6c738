-- Reads a job. No transition.
-- ARGV  1 job id
-- Returns nil (unknown) or an array: state, attempt, created, started or "", ended or "", the part of each candidate that was
--       trimmed from the stream, see `trimmed`, the entries of the stream, and last, each "" where there is none: meta (JSON),
--       batch, the job that it redrives, the job that redrives it, retries, deadline, when it is due, engine, tenant, tokens in
--       the checkpoints
-- include: queue record candidates trimmed_outputs

local id = ARGV[1]
local f = record(id, 'state', 'attempt', 'created', 'started', 'ended', 'trimmed', 'meta', 'batch', 'redrive_of',
  'redriven_as', 'retries', 'deadline', 'n', 'engine', 'tenant', 'fingerprint')
if not f[1] then return false end
local meta = f[7] and redis.call('GET', prefix .. 'meta:' .. id)
local due = f[1] == 'delayed' and redis.call('ZSCORE', prefix .. 'delayed', id)
local num_bytes = 0
if f[16] and not f[5] then  -- a reader may have no right to STRLEN
  for _, suffix in ipairs(suffixes(f[13])) do
    num_bytes = num_bytes + #(redis.call('GET', prefix .. 'tokens:' .. id .. suffix) or '')
  end
end
return {f[1], f[2] or '0', f[3], f[4] or '', f[5] or '', trimmed_outputs(id, f[6], f[13]),
  redis.call('XRANGE', prefix .. 'result:' .. id, '-', '+'),
  meta or '', f[8] or '', f[9] or '', f[10] or '', f[11] or '0', f[12] or '', due or '', f[14] or '', f[15] or '', num_bytes / 4}
