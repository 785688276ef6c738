-- Reads a job. No transition.
-- KEYS  1 the queue's prefix
-- ARGV  1 job id
-- Returns nil (unknown) or an array: state, attempt, created, started or "", ended or "", then the part that was trimmed from
--       the stream: its text and its tokens (4 bytes each), the entries of the stream, and last, each "" where there is none:
--       meta (JSON), batch, the job that it redrives, the job that redrives it, retries, deadline, when it is due
-- include: queue record

local id = ARGV[1]
local f = record(id, 'state', 'attempt', 'created', 'started', 'ended', 'trimmed', 'meta', 'batch', 'redrive_of',
  'redriven_as', 'retries', 'deadline')
if not f[1] then return false end
local text, tokens = '', ''
if f[6] then
  text = redis.call('GET', prefix .. 'text:' .. id) or ''
  tokens = redis.call('GETRANGE', prefix .. 'tokens:' .. id, 0, f[6] * 4 - 1)
end
local meta = f[7] and redis.call('GET', prefix .. 'meta:' .. id)
local due = f[1] == 'delayed' and redis.call('ZSCORE', prefix .. 'delayed', id)
return {f[1], f[2] or '0', f[3], f[4] or '', f[5] or '', text, tokens,
  redis.call('XRANGE', prefix .. 'result:' .. id, '-', '+'),
  meta or '', f[8] or '', f[9] or '', f[10] or '', f[11] or '0', f[12] or '', due or ''}
