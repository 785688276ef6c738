-- Reads the part of the output that was trimmed from a job's stream. No transition.
-- KEYS  1 the queue's prefix
-- ARGV  1 job id
-- Returns an array: the text, the tokens (4 bytes each), id of the last trimmed entry; then the text and the tokens of each
--       candidate from the second on; then, where there are log-probabilities, an array with those of each candidate: a line of
--       JSON for each token, of these and maybe of later ones
-- include: record trimmed_outputs

local id = ARGV[1]
local f = record(id, 'trimmed', 'trimmed_id', 'n')
local trimmed, logprobs = trimmed_outputs(id, f[1], f[3])
table.insert(trimmed, 3, f[2] or '')
trimmed[#trimmed + 1] = logprobs
return trimmed
