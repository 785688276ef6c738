-- Reads the part of the output that was trimmed from a job's stream. No transition.
-- ARGV  1 job id
-- Returns an array: the id of the last trimmed entry or "", then for each candidate an array: the text, the tokens (4 bytes each),
--       the log-probabilities, a line of JSON for each token, of these and maybe of later ones, and the parts of a chat, a line of
--       JSON for each event; each "" where there is none
-- include: record trimmed_outputs

local id = ARGV[1]
local f = record(id, 'trimmed', 'trimmed_id', 'n')
local reply = trimmed_outputs(id, f[1], f[3])
table.insert(reply, 1, f[2] or '')
return reply
