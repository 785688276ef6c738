"""One RQ queue as a source of jobs, and the record of which gateway has taken which of its jobs.

RQ has no such record: between its queue and StartedJobRegistry a job is in a list that does not name the taker. The script
that takes a job off its queue puts it into this record, and the transaction that writes the job's end removes it. When a
gateway is killed, another one continues from the record:

    key millrace:gateway:rq:...          type  what                                                  exists
    -----------------------------------  ----  ----------------------------------------------------  ----------------
    alive:<queue>:<rq queue>             zset  gateways, score last heartbeat ms                     until taken over
    taken:<queue>:<gateway>:<rq queue>   hash  RQ job id -> id of the Millrace job, "" at first      while not empty

<queue> is Millrace's queue: only a gateway that feeds the same one can continue a job. A gateway's name is the name of its
RQ worker, a new one for every process. The fence is the field `worker_name` of rq:job:<id>: taking a job and taking it over
write it together with the record, and the job's end is written under WATCH of it. A gateway that was suspended meanwhile
finds another name there and drops the job.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import redis
from redis.client import Pipeline
from rq import Queue
from rq.job import Job
from rq.suspension import WORKERS_SUSPENDED

from millrace.producer.rq.isolation import text, write

GATEWAY_TTL_MS = 5000
"""When a gateway has sent no heartbeat for this time, another gateway takes over its jobs."""


class SourceQueue:
    """Owns the record of the jobs that one gateway has taken from one RQ queue."""

    def __init__(self, connection: redis.Redis, queue: Queue, to_queue: str, gateway: str) -> None:
        self.queue = queue
        self._connection = connection
        self._gateway = gateway
        self._alive = f"millrace:gateway:rq:alive:{to_queue}:{queue.name}"
        self._record_parts = (f"millrace:gateway:rq:taken:{to_queue}:", f":{queue.name}")
        self.record = gateway.join(self._record_parts)
        self._take = connection.register_script(_TAKE)
        self._heartbeat = connection.register_script(_HEARTBEAT)
        self._take_over = connection.register_script(_TAKE_OVER)

    def take(self, max_jobs: int) -> list[bytes] | None:
        """Move ids from the RQ queue to its intermediate list and into the record. None: RQ is suspended."""
        keys = [self.queue.key, self.queue.intermediate_queue_key, self.record, WORKERS_SUSPENDED]
        return cast("list[bytes] | None", self._take(keys, [max_jobs, self._gateway, Job.redis_job_namespace_prefix]))

    def heartbeat(self) -> None:
        """Renew this gateway's heartbeat."""
        self._heartbeat([self._alive], [self._gateway])

    def living(self) -> list[str]:
        """Return the names of the gateways whose heartbeat is not older than the limit."""
        seconds, microseconds = self._connection.time()
        limit_ms = seconds * 1000 + microseconds // 1000 - GATEWAY_TTL_MS
        found = cast("list[bytes]", self._connection.zrangebyscore(self._alive, limit_ms, "+inf"))
        return [text(name) for name in found]

    def take_over(self) -> tuple[str, list[bytes]] | None:
        """Take over jobs, up to 256, of one gateway that has died or signed off. Return its name and the ids; None when
        there is no such gateway."""
        before, after = self._record_parts
        arguments = (self._gateway, GATEWAY_TTL_MS, before, after, Job.redis_job_namespace_prefix)
        reply: Any = self._take_over([self._alive, self.record], arguments)
        return None if reply is None else (text(reply[0]), reply[1:])

    def job_ids(self) -> list[bytes]:
        return cast("list[bytes]", self._connection.hkeys(self.record))

    def num_jobs(self) -> int:
        return self._connection.hlen(self.record)

    def sign_off(self) -> None:
        """Leave: another gateway can take over at once what is still in the record."""
        if self.num_jobs():
            self._connection.zadd(self._alive, {self._gateway: 0})
        else:
            self._connection.zrem(self._alive, self._gateway)

    def drop(self, ids: Iterable[bytes | str]) -> None:
        """Remove jobs from the record without an end in RQ."""
        with self._connection.pipeline() as pipe:
            for job_id in ids:
                self.write_dropped(pipe, job_id)
            write(pipe)

    # --- parts of a caller's transaction ---

    def write_registered(self, pipe: Pipeline, job_id: str, millrace_id: str) -> None:
        self.write_left_intermediate(pipe, job_id)
        pipe.hset(self.record, job_id, millrace_id)

    def write_dropped(self, pipe: Pipeline, job_id: bytes | str) -> None:
        self.write_left_intermediate(pipe, job_id)
        self.write_ended(pipe, job_id)

    def write_ended(self, pipe: Pipeline, job_id: bytes | str) -> None:
        pipe.hdel(self.record, cast(str, job_id))

    def write_left_intermediate(self, pipe: Pipeline, job_id: bytes | str) -> None:
        pipe.lrem(self.queue.intermediate_queue_key, 1, cast(str, job_id))


_TAKE = """
-- Takes jobs off an RQ queue: queue -> intermediate list, as RQ's own LMOVE does, and into the gateway's record.
-- KEYS  1 RQ's queue, 2 its intermediate list, 3 the record of taken jobs, 4 RQ's mark that workers are suspended
-- ARGV  1 most jobs, 2 this gateway, 3 "rq:job:"
-- Returns nil when suspended, else the ids; none when the queue is not a list

if redis.call('EXISTS', KEYS[4]) == 1 then return false end
local ids = redis.call('TYPE', KEYS[1]).ok == 'list' and redis.call('LPOP', KEYS[1], ARGV[1]) or {}
for _, id in ipairs(ids) do
  redis.call('HSETNX', KEYS[3], id, '')
  -- pcall: these keys may have wrong types, and the ids have already left the queue
  redis.pcall('RPUSH', KEYS[2], id)
  if redis.call('EXISTS', ARGV[3] .. id) == 1 then redis.pcall('HSET', ARGV[3] .. id, 'worker_name', ARGV[2]) end
end
return ids
"""

_HEARTBEAT = """
-- A gateway's heartbeat.
-- KEYS  1 the gateways
-- ARGV  1 this gateway
-- Returns nil

local clock = redis.call('TIME')
redis.call('ZADD', KEYS[1], clock[1] * 1000 + math.floor(clock[2] / 1000), ARGV[1])
"""

_TAKE_OVER = """
-- Moves jobs from the record of one gateway that has stopped to this one's; removes that gateway when it has no more.
-- KEYS  1 the gateways, 2 this gateway's record
-- ARGV  1 this gateway, 2 heartbeat limit in ms, 3 and 4 the parts of a record's key before and after the gateway's name,
--       5 "rq:job:"
-- Returns nil when all gateways are alive, else the name of the one that has stopped, and up to 256 job ids

local clock = redis.call('TIME')
local limit = clock[1] * 1000 + math.floor(clock[2] / 1000) - ARGV[2]
for _, gateway in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', limit, 'LIMIT', 0, 2)) do
  if gateway ~= ARGV[1] then
    local theirs = ARGV[3] .. gateway .. ARGV[4]
    local entries = redis.call('TYPE', theirs).ok == 'hash' and redis.call('HGETALL', theirs) or {}
    local reply = {gateway}
    for i = 1, math.min(#entries, 512), 2 do
      local id = entries[i]
      if (redis.call('HGET', KEYS[2], id) or '') == '' then redis.call('HSET', KEYS[2], id, entries[i + 1]) end
      redis.call('HDEL', theirs, id)
      if redis.call('EXISTS', ARGV[5] .. id) == 1 then redis.pcall('HSET', ARGV[5] .. id, 'worker_name', ARGV[1]) end
      reply[#reply + 1] = id
    end
    if #entries <= 512 then redis.call('ZREM', KEYS[1], gateway) end
    return reply
  end
end
return false
"""
