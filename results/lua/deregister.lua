-- An engine leaves: what it still holds goes back, running -> queued, the attempt does not count.
-- KEYS  1 the queue's prefix
-- ARGV  1 engine id
-- Returns the number of jobs that went back

go_on_when_out_of_memory()
local engine = ARGV[1]
local ids = redis.call('SMEMBERS', prefix .. 'leases:' .. engine)
for _, id in ipairs(ids) do give_back_unharmed(id, engine, 0) end
wake(#ids)
redis.call('DEL', prefix .. 'engine:' .. engine, prefix .. 'signals:' .. engine)
redis.call('ZREM', prefix .. 'engines', engine)
return #ids
