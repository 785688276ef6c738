-- Removes an engine. Its jobs go back: running -> queued; the attempts do not count.
-- ARGV  1 engine id
-- Returns the number of jobs that went back
-- include: queue work give_back

allow_writes_without_memory()
local engine = ARGV[1]
local ids = redis.call('SMEMBERS', prefix .. 'leases:' .. engine)
for _, id in ipairs(ids) do give_back_uncounted(id, engine, 0) end
wake(#ids)
redis.call('DEL', prefix .. 'engine:' .. engine, prefix .. 'signals:' .. engine)
redis.call('ZREM', prefix .. 'engines', engine)
return #ids
