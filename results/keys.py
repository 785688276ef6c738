"""The key legend: every key of a queue in Redis. The Lua scripts build keys by it; Python gets those that it uses here.

All keys of a queue share the hash tag `{queue}`, so they live in one slot of a Redis Cluster.

    key millrace:{q}:...   type    what                                          written by           lives
    ---------------------  ------  --------------------------------------------  -------------------  -------------------
    job:<id>               hash    the record; short values, stays a listpack    every transition     record TTL after end
    body:<id>              string  the request, raw JSON                         submit               like the record
    meta:<id>              string  the submitter's own JSON object               submit               like the record
    tokens:<id>            string  checkpoint: token ids, uint32 little-endian   append, release      until the end *
    logprobs:<id>          string  their log-probabilities, a JSON line each     append, release      like the tokens
    result:<id>            stream  events, then one terminal entry               append, finish       result TTL after end
    text:<id>              string  text of events that the stream has lost       append               like the result
    chat:<id>              string  parts of a chat in events that it has lost     append               like the result
    watched:<id>           string  somebody reads the job live                   watch                as long as requested
    ready:<tenant>         zset    queued jobs, score priority, by age within    submit, release      while not empty
    tenants                zset    tenants with ready jobs, score virtual time   submit, claim        while not empty
    away                   zset    tenants without any, while others have some   submit, claim        until caught up
    delayed                zset    jobs that wait for a time, score ready at ms  submit, release      while not empty
    deadlines              zset    jobs with a deadline, score when, ms          submit, finish       while not empty
    waiting                hash    jobs and tokens not yet running, by tenant    submit, claim        while not empty
    batch:<batch>          hash    counts of a batch's jobs by state             every transition     record TTL after end
    members:<batch>        list    ids of a batch's jobs                         submit               like its batch
    leases:<engine>        set     jobs that this engine holds                   claim, finish        while not empty
    engines                zset    engines, score last heartbeat ms              heartbeat            until recovered
    engine:<engine>        hash    heartbeat, model, claim, what is asked of it  heartbeat, claim **  heartbeat limit
    signals:<engine>       list    a kind and a job id, or "beat now"            cancel, watch, ...   60 s
    done                   stream  completions: id, state                        finish               100,000 entries
    dead                   zset    failed jobs, score ended at ms                finish, redrive      TTL after last one
    inbox                  stream  requests of any client: field `job`, JSON     anybody              until accepted
    rejected               stream  inbox entries that are no jobs, 4 KiB each     reject               1,000 entries, 7 days
    wake                   list    one element wakes one idle engine             submit, release      64 elements
    settings               hash    times, limits, weights, paused                operator             permanent
    counts                 hash    jobs queued now, totals of ends and tokens    every transition     permanent
    serial                 string  the last number for an age or a lease         submit, claim        permanent
    copy                   stream  a smaller copy of a result, which it replaces  every end of a job  within the script

    * or like the result, when the stream has lost events
    ** and sleep and reset_cache, which an operator calls

Of several candidates each has tokens:<id>:<index>, logprobs:<id>:<index>, text:<id>:<index> and chat:<id>:<index>.
"""

from __future__ import annotations

import re

NAME_PATTERN = r"[A-Za-z0-9._-]{1,64}"
"""Of the names of queues, tenants and batches."""
QUEUE_PATTERN = re.compile(NAME_PATTERN)


class QueueKeys:
    """Names the keys of one queue."""

    def __init__(self, queue: str) -> None:
        if not QUEUE_PATTERN.fullmatch(queue):
            raise ValueError(f"queue: must match {NAME_PATTERN}, got {queue!r}")
        self.queue = queue
        self.prefix = f"millrace:{{{queue}}}:"
        self.done = self.prefix + "done"
        self.dead = self.prefix + "dead"
        self.inbox = self.prefix + "inbox"
        self.rejected = self.prefix + "rejected"
        self.wake = self.prefix + "wake"
        self.settings = self.prefix + "settings"
        self.waiting = self.prefix + "waiting"

    def job(self, job_id: str) -> str:
        return self.prefix + "job:" + job_id

    def body(self, job_id: str) -> str:
        return self.prefix + "body:" + job_id

    def result(self, job_id: str) -> str:
        return self.prefix + "result:" + job_id

    def members(self, batch: str) -> str:
        return self.prefix + "members:" + batch

    def signals(self, engine_id: str) -> str:
        return self.prefix + "signals:" + engine_id
