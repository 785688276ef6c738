"""Whatever engines, readers and crashes do to jobs in whatever order, the record agrees with a simple model of it."""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from millrace.embedded import EmbeddedServer
from millrace.producer.prompt_start import prompt_digest
from millrace.results import commands
from millrace.results.connection import connect
from millrace.results.errors import CannotRedrive
from millrace.results.messages import TERMINAL_STATES, Checkpoint, ClaimedJob, Event, JobError, JobId
from millrace.results.replies import Outcome
from tests.results.engines import Engine, outcomes, submission
from tests.results.full_queue import FullQueue
from tests.results.invariants import check_queue

TENANTS = ("x", "y")
PASTS = ((0, 0), (1, 0), (4, 0), (2, 19))
"""What engines have died of a job before: the crash rule ends at 5, or at 20."""
BATCHES = ("b1", "b2")
FINGERPRINTS = ("model-a", "model-a", "model-b")
"""Of the engines: one has another model."""
BODIES = tuple(b'{"prompt":"%s"}' % (letter * 300) for letter in (b"a", b"b"))
DIGESTS = [prompt_digest(body) or "" for body in BODIES]
MAX_QUEUED, TENANT_MAX_QUEUED = 12, 7
MAX_EVENTS = 4
"""So that streams are trimmed."""
LATER_MS = 7_200_000
NUM_AT_FIRST = 6
"""Jobs that are there from the beginning: what happens to an empty queue is soon told."""
ERROR = JobError(kind="invalid_request", message="body: is not JSON", field="body")
engines = st.integers(0, 2)
picks = st.integers(0, 1000)


class ModelOutput:
    """What a candidate should have produced."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.num_published = 0

    @property
    def text(self) -> str:
        return _text_of(self.tokens[: self.num_published])

    def publish(self, index: int | None) -> Event | None:
        """Return the event with what is not published yet."""
        start, self.num_published = self.num_published, len(self.tokens)
        rest = self.tokens[start:]
        return Event(offset=start, token_ids=rest, text=_text_of(rest), index=index) if rest else None


def _text_of(tokens: list[int]) -> str:
    return "".join(f"{token} " for token in tokens)


class ModelJob:
    """What a job should look like."""

    def __init__(self, tenant: str | None, num_candidates: int = 1) -> None:
        self.tenant = tenant
        """None: it came as a malformed inbox entry, and nothing can be run."""
        self.state = "queued"
        self.fingerprint: str | None = None
        self.is_watched = False
        self.outputs = [ModelOutput() for _ in range(num_candidates)]
        self.owner: int | None = None
        self.lease = 0
        self.has_cancel = False
        self.has_deadline = False
        self.is_past_deadline = False
        self.is_told = False
        self.num_retries = 0
        self.max_retries = 2
        self.is_redriven = False
        self.num_tokens_at_claim = 0
        self.is_unbegun = False
        self.crashes = 0
        self.false_starts = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(output.tokens) for output in self.outputs)

    @property
    def num_published(self) -> int:
        return sum(output.num_published for output in self.outputs)

    def indices(self) -> list[int | None]:
        """What the writes of an engine call the candidates."""
        return [None] if len(self.outputs) == 1 else [*range(len(self.outputs))]

    def leave(self) -> None:
        """Goes back to the queue, unless its end was asked for."""
        after = "cancelled" if self.has_cancel else "expired" if self.is_past_deadline else "queued"
        self.state, self.owner, self.lease = after, None, 0

    def lose_engine(self) -> None:
        """The crash rule."""
        if self.num_tokens > self.num_tokens_at_claim:
            self.crashes = self.false_starts = 0
        elif self.is_unbegun:
            self.false_starts += 1
        else:
            self.crashes += 1
        if (self.crashes >= 5 or self.false_starts >= 20) and not self.has_cancel:
            self.state, self.owner, self.lease = "failed", None, 0
        else:
            self.leave()

    def sweep(self) -> None:
        """Some engine has looked at the deadlines."""
        if self.is_past_deadline and self.state in ("queued", "delayed"):
            self.state = "expired"
        self.is_told = self.is_told or self.is_past_deadline


class AnyOrder(RuleBasedStateMachine):
    client: redis.Redis

    @initialize()
    def open(self) -> None:
        self.queue = FullQueue(self.client, f"any-{uuid.uuid4().hex[:12]}")
        self.last_claims: dict[int, tuple[str, list[ClaimedJob]]] = {}
        self.engines = [self._new_engine(number) for number in range(3)]
        self.jobs: dict[str, ModelJob] = {}
        self.is_paused = False
        self.client.hset(
            self.queue.keys.settings,
            mapping={
                "max_queued_jobs": MAX_QUEUED,
                "tenant_max_queued_jobs": TENANT_MAX_QUEUED,
                "max_events": MAX_EVENTS,
                "retry_base_ms": 3_600_000,
                "retry_max_ms": 3_600_000,
            },
        )
        self.leases: list[tuple[int, ClaimedJob]] = []  # all that there ever were
        for priority in range(NUM_AT_FIRST):
            self.submit(TENANTS[priority % 2], priority, 10, {}, PASTS[priority % len(PASTS)])

    @rule(
        tenant=st.sampled_from(TENANTS),
        priority=st.integers(-1, 1),
        cost=st.integers(1, 50),
        options=st.fixed_dictionaries(
            {},
            optional={
                "delay_ms": st.just(3_600_000),
                "deadline_ms": st.just(LATER_MS),
                "max_retries": st.integers(0, 1),
                "batch": st.sampled_from(BATCHES),
                "n": st.integers(1, 3),
                "meta": st.just(b'{"a":1}'),
            },
        ),
        past=st.sampled_from(PASTS),
        body=st.sampled_from(BODIES),
    )
    def submit(
        self,
        tenant: str,
        priority: int,
        cost: int,
        options: dict[str, Any],
        past: tuple[int, int],
        body: bytes = BODIES[0],
    ) -> None:
        job_id = f"j{len(self.jobs)}"
        job = submission(job_id, tenant=tenant, priority=priority, cost=cost, body=body, **options)
        if limit := self._limit_reached(tenant):
            assert self.queue.submit([job]) == outcomes([limit])
            return
        assert self.queue.submit([job, job]) == outcomes(["created", "exists"])
        self.jobs[job_id] = model = ModelJob(tenant, options.get("n", 1))
        model.state = "delayed" if "delay_ms" in options else "queued"
        model.has_deadline = "deadline_ms" in options
        model.max_retries = options.get("max_retries", 2)
        model.crashes, model.false_starts = past
        if any(past):  # then it has been claimed before
            key = self.queue.keys.job(job_id)
            self.client.hset(key, mapping={"attempt": 0, "crashes": model.crashes, "false_starts": model.false_starts})

    def _limit_reached(self, tenant: str) -> str | None:
        waiting = [model.tenant for model in self.jobs.values() if model.state in ("queued", "delayed")]
        if len(waiting) >= MAX_QUEUED:
            return f"full max_queued_jobs {MAX_QUEUED}"
        if waiting.count(tenant) >= TENANT_MAX_QUEUED:
            return f"full tenant_max_queued_jobs {TENANT_MAX_QUEUED}"
        return None

    @rule(tenant=st.sampled_from(TENANTS))
    def accept(self, tenant: str) -> None:
        """A job comes through the inbox, and two engines see it."""
        entry_id, job_id = self._post(), f"j{len(self.jobs)}"
        job = submission(job_id, tenant=tenant)
        if limit := self._limit_reached(tenant):
            assert [self.queue.accept(entry_id, job)] == outcomes([limit])
            assert self.client.xdel(self.queue.keys.inbox, entry_id) == 1
            return
        assert self.queue.accept(entry_id, job) == Outcome("created")
        assert self.queue.accept(entry_id, job) == Outcome("taken")
        assert self.queue.accept(self._post(), job) == Outcome("exists")
        other_id, other = self._post(), submission(job_id, body=b"another")
        assert self.queue.accept(other_id, other) == Outcome("conflict")
        assert self.queue.reject(other_id, JobId(job_id), b"another", ERROR) == "rejected"
        self.jobs[job_id] = ModelJob(tenant)

    @precondition(lambda self: all(model.tenant for model in self.jobs.values()))
    @rule()
    def reject(self) -> None:
        entry_id, job_id = self._post(), JobId(f"j{len(self.jobs)}")
        assert self.queue.reject(entry_id, job_id, b"{", ERROR) == "failed"
        assert self.queue.reject(entry_id, job_id, b"{", ERROR) == "taken"
        assert self.queue.reject(self._post(), job_id, b"{", ERROR) == "exists"
        assert self.queue.reject(self._post(), job_id, b"[", ERROR) == "rejected"
        self.jobs[job_id] = model = ModelJob(None)
        model.state = "failed"

    def _post(self) -> str:
        entry_id = self.client.xadd(self.queue.keys.inbox, {"job": "{}"})
        assert isinstance(entry_id, bytes)
        return entry_id.decode()

    @precondition(lambda self: self.jobs)
    @rule(pick=picks)
    def watch(self, pick: int) -> None:
        job_id = list(self.jobs)[pick % len(self.jobs)]
        model = self.jobs[job_id]
        state, *_ = self.queue._transport.send(commands.watch(self.queue.keys, job_id))
        assert state.decode() == model.state
        model.is_watched = True

    @precondition(lambda self: self.has("delayed"))
    @rule(pick=picks)
    def become_due(self, pick: int) -> None:
        """Its time comes, and an engine looks."""
        if job_id := self._pick(pick, "delayed"):
            self.client.zadd(f"{self.queue.keys.prefix}delayed", {job_id: 1})
            self._beat(0)
            if self.jobs[job_id].state == "delayed":
                self.jobs[job_id].state = "queued"

    @precondition(lambda self: self.has("queued", "delayed", "running"))
    @rule(pick=picks)
    def pass_the_deadline(self, pick: int) -> None:
        job_id = self._pick(pick, "queued", "delayed", "running")
        if job_id and self.jobs[job_id].has_deadline and not self.jobs[job_id].is_past_deadline:
            self.client.hset(self.queue.keys.job(job_id), mapping={"created": 0, "deadline": LATER_MS})
            self.client.zadd(f"{self.queue.keys.prefix}deadlines", {job_id: 1})
            self.jobs[job_id].is_past_deadline = True

    @precondition(lambda self: self.has("queued", "delayed", "running"))
    @rule(number=engines)
    def beat(self, number: int) -> None:
        self._beat(number)

    @precondition(lambda self: self.has("queued", "delayed", "running"))
    @rule(is_paused=st.booleans())
    def pause(self, is_paused: bool) -> None:
        self.queue.pause(is_paused)
        self.is_paused = is_paused

    @precondition(lambda self: self.jobs)
    @rule(pick=picks)
    def redrive(self, pick: int) -> None:
        job_id = list(self.jobs)[pick % len(self.jobs)]
        model = self.jobs[job_id]
        if model.is_redriven or (model.tenant and model.state in ("failed", "expired", "cancelled")):
            new_id = self.queue.redrive(job_id)
            assert self.queue.redrive(job_id) == new_id
            assert (new_id in self.jobs) == model.is_redriven
            if not model.is_redriven:
                again = self.jobs[new_id] = ModelJob(model.tenant, len(model.outputs))
                again.has_deadline, again.max_retries = model.has_deadline, model.max_retries
                model.is_redriven = True
        else:
            with pytest.raises(CannotRedrive):
                self.queue.redrive(job_id)

    def has(self, *states: str) -> bool:
        return any(model.state in states for model in self.jobs.values())

    def _pick(self, pick: int, *states: str) -> str | None:
        fitting = [job_id for job_id, model in self.jobs.items() if model.state in states]
        return fitting[pick % len(fitting)] if fitting else None

    def _beat(self, number: int) -> None:
        engine = self.engines[number]
        engine.held = {
            job.job_id: job.lease
            for owner, job in self.leases
            if owner == number and self.jobs[job.job_id].lease == job.lease
        }
        news = engine.beat()
        for model in self.jobs.values():
            model.sweep()
        told = {id_ for id_, model in self.jobs.items() if model.owner == number and model.state == "running"}
        assert set(news.expired) == {id_ for id_ in told if self.jobs[id_].is_told}
        assert set(news.cancelled) == {id_ for id_ in told if self.jobs[id_].has_cancel}
        assert set(news.watched) == {id_ for id_ in told if self.jobs[id_].is_watched}

    @precondition(lambda self: self.has("queued"))
    @rule(number=engines, max_jobs=st.integers(1, 3), num_cached=st.integers(0, 2))
    def claim(self, number: int, max_jobs: int, num_cached: int = 0) -> None:
        engine, claim_id = self.engines[number], uuid.uuid4().hex
        claimed = engine.claim(max_jobs, claim_id=claim_id, cached_prompts=DIGESTS[2 - num_cached :])
        self.last_claims[number] = claim_id, claimed
        for model in self.jobs.values():
            model.sweep()
        assert not (claimed and self.is_paused)
        for job in claimed:
            model = self.jobs[job.job_id]
            assert model.state == "queued"
            if model.fingerprint not in (None, engine.fingerprint):  # nobody had seen the other model's output
                assert model.num_published == 0
                model.outputs, model.fingerprint = [ModelOutput() for _ in model.outputs], None
            self._check_claimed(job, model)
            assert all(job.lease > old.lease for _, old in self.leases)
            model.state, model.owner, model.lease = "running", number, job.lease
            model.num_tokens_at_claim, model.is_unbegun = model.num_tokens, model.crashes >= 2
            self.leases.append((number, job))
        self._put_off_what_is_another_models(engine)

    def _check_claimed(self, job: ClaimedJob, model: ModelJob) -> None:
        assert job.checkpoints == [Checkpoint(output.tokens, output.num_published) for output in model.outputs]
        assert (job.crash_count, job.is_watched) == (model.crashes, model.is_watched)

    def _put_off_what_is_another_models(self, engine: Engine) -> None:
        """A claim puts such jobs off by up to a second where it comes to them; here time does not pass by itself."""
        for job_id, model in self.jobs.items():
            if model.state == "queued" and model.num_published and model.fingerprint != engine.fingerprint:
                later_ms = time.time_ns() // 1_000_000 + 3_600_000
                if self.client.zadd(f"{self.queue.keys.prefix}delayed", {job_id: later_ms}, xx=True, ch=True):
                    model.state = "delayed"

    @precondition(lambda self: self.has("queued"))
    @rule(number=engines, num_events=st.integers(1, 6), is_shown=st.booleans(), is_released=st.booleans())
    def serve_a_while(self, number: int, num_events: int, is_shown: bool, is_released: bool) -> None:
        """So that there is output to go on after, to be trimmed, and of another model."""
        num_before = len(self.leases)
        self.claim(number, 1)
        for pick in range(num_before, len(self.leases)):
            for number_of_event in range(num_events):
                self.append(pick, number_of_event, 1, is_shown)
            if is_released:
                self.release(pick)

    @precondition(lambda self: self.last_claims)
    @rule(pick=picks)
    def repeat_a_claim(self, pick: int) -> None:
        number = list(self.last_claims)[pick % len(self.last_claims)]
        claim_id, claimed = self.last_claims[number]
        again = self.engines[number].claim(9, claim_id=claim_id)
        kept = [job for job in claimed if self.jobs[job.job_id].lease == job.lease]
        kept = [job for job in kept if self.jobs[job.job_id].state == "running"]
        assert [(job.job_id, job.lease) for job in again] == [(job.job_id, job.lease) for job in kept]
        for job in again:
            self._check_claimed(job, self.jobs[job.job_id])

    @precondition(lambda self: self.leases)
    @rule(pick=picks)
    def begin(self, pick: int) -> None:
        number, job = self.leases[pick % len(self.leases)]
        model = self.jobs[job.job_id]
        is_owned = model.state == "running" and model.lease == job.lease
        assert self.engines[number].begin(job) == ("ok" if is_owned else "stale")
        if is_owned:
            model.is_unbegun = False

    @precondition(lambda self: self.leases)
    @rule(pick=picks, candidate=picks, num_tokens=st.integers(1, 3), is_shown=st.booleans())
    def append(self, pick: int, candidate: int, num_tokens: int, is_shown: bool) -> None:
        number, job = self.leases[pick % len(self.leases)]
        model = self.jobs[job.job_id]
        candidate %= len(model.outputs)
        index, output = model.indices()[candidate], copy.deepcopy(model.outputs[candidate])
        offset = len(output.tokens)
        fresh = list(range(offset, offset + num_tokens))
        output.tokens += fresh
        event = output.publish(index) if is_shown else None
        outcome = self.engines[number].append(job, offset, fresh, event, index)
        is_owned = model.state == "running" and model.lease == job.lease
        assert outcome == ("ok" if is_owned else "stale")
        if is_owned:
            model.outputs[candidate] = output
            model.fingerprint = self.engines[number].fingerprint

    @precondition(lambda self: self.leases)
    @rule(pick=picks, state=st.sampled_from(["finished", "failed", "cancelled"]))
    def finish(self, pick: int, state: Any) -> None:
        number, job = self.leases[pick % len(self.leases)]
        model = self.jobs[job.job_id]
        outputs = copy.deepcopy(model.outputs)
        events = [output.publish(index) for output, index in zip(outputs, model.indices(), strict=True)]
        outcome = self.engines[number].finish(job, *events, state=state)
        if model.lease != job.lease:  # given back, or lost in a crash, since
            assert outcome == "stale"
        elif model.state in TERMINAL_STATES:
            assert outcome == "already"
        else:
            assert outcome == "ok"
            model.state, model.outputs = state, outputs

    @precondition(lambda self: self.leases)
    @rule(pick=picks)
    def fail_for_now(self, pick: int) -> None:
        number, job = self.leases[pick % len(self.leases)]
        model = self.jobs[job.job_id]
        if model.state != "running" or model.lease != job.lease:
            return
        outcome = self.engines[number].finish(job, state="failed", is_retryable=True)
        if model.has_cancel or model.is_told:
            assert outcome == "ok"
            model.leave()
        elif model.num_retries < model.max_retries:
            assert outcome == "retrying"
            model.num_retries += 1
            model.leave()
            if model.state == "queued":
                model.state = "delayed"
        else:
            assert outcome == "ok"
            model.state = "failed"

    @precondition(lambda self: self.leases)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        number, job = self.leases[pick % len(self.leases)]
        model = self.jobs[job.job_id]
        is_owned = model.state == "running" and model.lease == job.lease
        assert self.engines[number].release(job) == ("ok" if is_owned else "stale")
        if is_owned:
            model.leave()

    @precondition(lambda self: self.has("running"))
    @rule(number=engines)
    def crash(self, number: int) -> None:
        self.engines[number].die()
        while self.queue.recover(2):
            pass
        for model in self.jobs.values():
            if model.state == "running" and model.owner == number:
                model.lose_engine()
        self.engines[number] = self._new_engine(number)
        for model in self.jobs.values():
            model.sweep()

    def _new_engine(self, number: int) -> Engine:
        self.last_claims.pop(number, None)
        return Engine(self.queue, f"e{number}", fingerprint=FINGERPRINTS[number])

    @precondition(lambda self: self.has("running"))
    @rule(number=engines)
    def deregister(self, number: int) -> None:
        held = [model for model in self.jobs.values() if model.state == "running" and model.owner == number]
        assert self.queue.deregister(self.engines[number].id) == len(held)
        for model in held:
            model.leave()
        self.engines[number] = self._new_engine(number)
        for model in self.jobs.values():
            model.sweep()

    @precondition(lambda self: self.has("queued"))
    @rule(number=engines, has_begun=st.booleans())
    def claim_and_crash(self, number: int, has_begun: bool) -> None:
        """The shortest life of an engine, so that the crash rule comes to its end."""
        num_before = len(self.leases)
        self.claim(number, 1)
        for _, job in self.leases[num_before:] if has_begun else []:
            assert self.engines[number].begin(job) == "ok"
            self.jobs[job.job_id].is_unbegun = False
        self.crash(number)

    @precondition(lambda self: self.has("running"))
    @rule(number=engines)
    def lose_a_reply(self, number: int) -> None:
        self.engines[number].held.clear()
        self.engines[number].beat()
        self.engines[number].beat()
        for model in self.jobs.values():
            model.sweep()
            if model.state == "running" and model.owner == number:
                model.leave()

    @precondition(lambda self: self.jobs)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        job_id = list(self.jobs)[pick % len(self.jobs)]
        model = self.jobs[job_id]
        expected = {"queued": "cancelled", "delayed": "cancelled", "running": "cancelling"}.get(
            model.state, model.state
        )
        assert self.queue.cancel(job_id) == expected
        if model.state in ("queued", "delayed"):
            model.state = "cancelled"
        model.has_cancel = model.has_cancel or model.state == "running"

    @invariant()
    def the_record_agrees(self) -> None:
        if hasattr(self, "queue"):
            states = check_queue(self.client, self.queue.keys.queue)
            assert states == {job_id: model.state for job_id, model in self.jobs.items()}

    def teardown(self) -> None:
        for job_id, model in getattr(self, "jobs", {}).items():
            found = [output.text for output in self.queue.get(job_id).outputs]
            assert found == [output.text for output in model.outputs]


@pytest.fixture
def machine() -> Iterator[type[AnyOrder]]:
    """On a server of its own: the look at the whole queue after each step is quick where there is little else."""
    with EmbeddedServer() as server, connect(server.url) as client:
        yield type("AnyOrderHere", (AnyOrder,), {"client": client})


@pytest.mark.timeout(600)
def test_any_order_of_events_keeps_the_record_right(machine: type[AnyOrder]) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    limits = settings(
        max_examples=50, stateful_step_count=50, deadline=None, database=None, suppress_health_check=checks
    )
    run_state_machine_as_test(machine, settings=limits)
