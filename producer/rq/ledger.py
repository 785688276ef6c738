"""Which gateway has taken which RQ jobs: the record from which another gateway goes on where a killed one stopped.

RQ has no such record. A job between its queue and StartedJobRegistry lies in a list that says nothing about who took it,
and an execution says nothing about whether its process lives. So a job enters this ledger in the script that takes it off
its queue, and leaves it in the transaction that writes its end:

    key millrace:gateway:rq:...          type  what                                                 lives
    -----------------------------------  ----  ---------------------------------------------------  ---------------
    alive:<queue>:<rq queue>             zset  gateways, score last heartbeat ms                    until adopted
    taken:<queue>:<gateway>:<rq queue>   hash  RQ job id -> id of the Millrace job, "" at first   while not empty

<queue> is Millrace's queue: only a gateway that feeds the same one can go on with a job. A gateway's name is its RQ
worker name, one incarnation. The fence is the field `worker_name` of rq:job:<id>: taking and adopting a job write it in the
same step as the ledger, and whoever writes a job's end has it under WATCH. A gateway that was only asleep finds another
name there and lets go.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

import redis
from redis.client import Pipeline
from rq import Queue
from rq.job import Job
from rq.suspension import WORKERS_SUSPENDED

GATEWAY_TTL_MS = 5000
"""Without a heartbeat for so long, a gateway's jobs go to another one."""

_PREFIX = "millrace:gateway:rq:"


class Adoption(NamedTuple):
    """Jobs taken over from a gateway that has died or signed off."""

    gateway: str
    job_ids: list[bytes]


class Ledger:
    """Owns the ledger of one RQ queue, on behalf of one gateway."""

    def __init__(self, connection: redis.Redis, queue: Queue, to_queue: str, gateway: str) -> None:
        self.queue = queue
        self._connection = connection
        self._gateway = gateway
        self._alive = f"{_PREFIX}alive:{to_queue}:{queue.name}"
        self._taken_by = (f"{_PREFIX}taken:{to_queue}:", f":{queue.name}")
        self.key = gateway.join(self._taken_by)
        self._lists = (queue.key, queue.intermediate_queue_key)
        self._take = connection.register_script(_TAKE)
        self._beat = connection.register_script(_BEAT)
        self._adopt = connection.register_script(_ADOPT)

    def take(self, max_jobs: int) -> list[bytes] | None:
        """Move ids from the RQ queue to its intermediate list and into the ledger. None: RQ is suspended."""
        keys = [*self._lists, self.key, WORKERS_SUSPENDED]
        return cast("list[bytes] | None", self._take(keys, [max_jobs, self._gateway, Job.redis_job_namespace_prefix]))

    def beat(self) -> None:
        """Stay alive."""
        self._beat([self._alive], [self._gateway])

    def adopt(self) -> Adoption | None:
        """Take over jobs, some at a time, of one gateway that has stopped; None when there is none."""
        arguments: list[str | int] = [self._gateway, GATEWAY_TTL_MS, *self._taken_by, Job.redis_job_namespace_prefix]
        reply = cast("list[bytes] | None", self._adopt([self._alive, self.key], arguments))
        if reply is None:
            return None
        return Adoption(reply[0].decode(), reply[1:])

    def job_ids(self) -> list[bytes]:
        """Everything that the ledger has for this gateway."""
        return cast("list[bytes]", self._connection.hkeys(self.key))

    def num_jobs(self) -> int:
        """How many those are."""
        return self._connection.hlen(self.key)

    def sign_off(self) -> None:
        """Leave: another gateway need not wait before it takes over what is still in the ledger."""
        if self.num_jobs():
            self._connection.zadd(self._alive, {self._gateway: 0})
        else:
            self._connection.zrem(self._alive, self._gateway)

    def drop(self, ids: Iterable[bytes]) -> None:
        """Forget what was taken but can be no job of RQ's."""
        with self._connection.pipeline() as pipe:
            for job_id in ids:
                self.leave_intermediate(pipe, job_id)
                self.remove(pipe, job_id)
            pipe.execute()

    # --- parts of somebody else's transaction ---

    def read(self, pipe: Pipeline, job_id: str) -> None:
        """Asks for the id of the Millrace job: None when the job is not this gateway's, b"" before it was registered."""
        pipe.hget(self.key, job_id)

    def write(self, pipe: Pipeline, job_id: str, native_id: str) -> None:
        pipe.hset(self.key, job_id, native_id)

    def remove(self, pipe: Pipeline, job_id: str | bytes) -> None:
        pipe.hdel(self.key, cast(str, job_id))

    def leave_intermediate(self, pipe: Pipeline, job_id: str | bytes) -> None:
        pipe.lrem(self._lists[1], 1, cast(str, job_id))


_TAKE = """
-- Takes jobs off an RQ queue: queue -> intermediate list, as RQ's own LMOVE does, and into this gateway's ledger.
-- KEYS  1 RQ's queue, 2 its intermediate list, 3 the ledger, 4 RQ's mark that workers are suspended
-- ARGV  1 most jobs, 2 this gateway, 3 "rq:job:"
-- Returns nil when suspended, else the ids

if redis.call('EXISTS', KEYS[4]) == 1 then return false end
local ids = redis.call('LPOP', KEYS[1], ARGV[1]) or {}
for _, id in ipairs(ids) do
  redis.call('RPUSH', KEYS[2], id)
  redis.call('HSETNX', KEYS[3], id, '')
  -- pcall: an id that somebody made up may be the name of something else
  if redis.call('EXISTS', ARGV[3] .. id) == 1 then redis.pcall('HSET', ARGV[3] .. id, 'worker_name', ARGV[2]) end
end
return ids
"""

_BEAT = """
-- A gateway's heartbeat.
-- KEYS  1 the gateways
-- ARGV  1 this gateway
-- Returns nil

local clock = redis.call('TIME')
redis.call('ZADD', KEYS[1], clock[1] * 1000 + math.floor(clock[2] / 1000), ARGV[1])
"""

_ADOPT = """
-- Moves jobs from the ledger of one gateway that has stopped to this one's; forgets that gateway when it has no more.
-- KEYS  1 the gateways, 2 this gateway's ledger
-- ARGV  1 this gateway, 2 heartbeat limit in ms, 3 what stands before and 4 behind a gateway's name in the key of its
--       ledger, 5 "rq:job:"
-- Returns nil when all gateways are well, else the name of the one that has stopped, and up to 256 job ids

local clock = redis.call('TIME')
local limit = clock[1] * 1000 + math.floor(clock[2] / 1000) - ARGV[2]
for _, gateway in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', limit, 'LIMIT', 0, 2)) do
  if gateway ~= ARGV[1] then
    local theirs = ARGV[3] .. gateway .. ARGV[4]
    local entries = redis.call('HGETALL', theirs)
    local reply = {gateway}
    for i = 1, math.min(#entries, 512), 2 do
      local id = entries[i]
      if (redis.call('HGET', KEYS[2], id) or '') == '' then redis.call('HSET', KEYS[2], id, entries[i + 1]) end
      redis.call('HDEL', theirs, id)
      if redis.call('EXISTS', ARGV[5] .. id) == 1 then redis.pcall('HSET', ARGV[5] .. id, 'worker_name', ARGV[1]) end
      reply[#reply + 1] = id
    end
    if redis.call('EXISTS', theirs) == 0 then redis.call('ZREM', KEYS[1], gateway) end
    return reply
  end
end
return false
"""
