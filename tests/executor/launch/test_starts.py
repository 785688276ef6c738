"""What goes wrong in a start, in each of its phases: which phase and which rank is named, whether to try again, and how the
engine ends."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import msgspec
import pytest
import zmq

from millrace.engine_service.core.scheduler import SchedulerConfig
from millrace.engine_service.errors import ConfigurationError, EngineDead, EngineError
from millrace.engine_service.worker_group import WorkerGroup
from millrace.executor.errors import StartError
from millrace.executor.launch.handshake import Handshake
from millrace.executor.launch.multiproc import MultiprocExecutor
from millrace.executor.launch.process import End
from millrace.executor.launch.uniproc import UniprocExecutor
from millrace.executor.metrics import Recorder
from millrace.executor.wire.channel import Channel
from millrace.executor.wire.messages import DumpStacks, Failure, StartFailed, encode
from tests.executor.kinds import SHORT, STUB, Make, marks_of, stub_config, worker_pids

slow = pytest.mark.slow

CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)

PATIENT = {"spawn": 60.0, "import": 60.0, "device": 60.0, "load_model": 60.0}
PLACES = {"spawn": "spawn", "import": "import", "device": "device", "load_model": "start", "kv_pool": "kv-pool"}
"""By phase: what the stub calls it."""

ENDS = {
    "raise": (False, "told to raise"),
    "die": (True, "SIGKILL"),
    "hang": (True, r"not done within|no reply"),
    "stop": (True, r"not done within|no heartbeat|no reply"),
}
"""By action: whether another attempt may help, and what the error says."""


def is_slow(phase: str, action: str) -> bool:
    """Waiting for a limit takes seconds: of those, `make test` has the ones that differ most."""
    return (phase, action) not in {("load_model", "hang"), ("kv_pool", "hang")} and action in ("hang", "stop")


@pytest.mark.parametrize(
    ("phase", "action"),
    [
        pytest.param(phase, action, marks=[slow] if is_slow(phase, action) else [])
        for phase in PLACES
        for action in ENDS
        if phase == "spawn" or action in ("hang", "stop")  # of the others every kind is asked
    ],
)
def test_a_start_that_is_stuck_names_the_phase_and_the_rank(
    phase: str, action: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = msgspec.structs.replace(
        SHORT, phase_s={**PATIENT, phase: 5.0 if phase == "spawn" else 1.5}, pool_call_s=1.5
    )
    monkeypatch.setenv("RUDE", f"{action}-at-spawn" if phase == "spawn" else "")
    config = stub_config(f"{action}-at-{PLACES[phase]},on-rank=1", tensor_parallel_size=2)
    executor = MultiprocExecutor(config, worker_module="tests.executor.rude_worker", limits=limits)
    monkeypatch.setattr(executor, "can_resize", False)  # without this rank there would be no fault
    monkeypatch.setattr("millrace.engine_service.worker_group.RESTART_BACKOFF_S", (0.0,))
    is_retryable, message = ENDS[action]
    if (phase, action) == ("spawn", "raise"):  # before it can say what it was
        is_retryable, message = True, "exit status 1"
    try:
        with pytest.raises(EngineError, match=message) as caught:
            WorkerGroup(executor, CONFIG).start()
    finally:
        executor.shutdown()
    error = caught.value.__cause__
    assert isinstance(error, StartError)
    assert (error.phase, error.rank, error.is_retryable) == (phase, 1, is_retryable)
    assert worker_pids(executor) == []
    assert (action, phase) != ("hang", "load_model") or "in fault_at" in capfd.readouterr().err


FAILURES: dict[str, tuple[type[EngineError], str | None, str]] = {
    "raise": (ConfigurationError, None, "told to raise"),
    "oom": (EngineDead, "out_of_memory", "no memory"),
    "die": (EngineDead, "error", r"SIGKILL|has ended|lost by Ray"),
    "exit": (EngineDead, "error", r"exit status 0|has ended|lost by Ray"),
}
"""By action: how the engine ends when its workers fail so, why, and what it says."""


QUICK = {("import", "raise"), ("device", "exit"), ("load_model", "die"), ("load_model", "oom"), ("kv_pool", "oom")}
"""(phase, action): `make test` has each phase and each action of every kind."""


def failures() -> Iterator[Any]:
    """(kind, phase, action), as parameters."""
    for kind, phase, action in product(("uni", "mp", "external", "ray"), list(PLACES)[1:], FAILURES):
        marks = [] if kind == "uni" or (phase, action) in QUICK else [slow]
        if kind != "uni" or action in ("raise", "oom"):  # else its worker would not end without us
            yield pytest.param(kind, phase, action, marks=[*marks, *marks_of(kind)])


@pytest.mark.parametrize(("make", "phase", "action"), list(failures()), indirect=["make"])
def test_a_start_that_fails_ends_the_engine_by_the_phase_the_rank_and_the_reason(
    make: Make, phase: str, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.engine_service.worker_group.RESTART_BACKOFF_S", (0.0, 0.0))
    num_ranks = 1 if isinstance(make(), UniprocExecutor) else 2
    rank = num_ranks - 1
    executor = make(f"{action}-at-{PLACES[phase]},on-rank={rank}", tensor_parallel_size=num_ranks)
    monkeypatch.setattr(executor, "can_resize", False)  # without this rank there would be no fault
    kind, cause, message = FAILURES[action]
    with pytest.raises(kind, match=message) as caught:
        WorkerGroup(executor, CONFIG).start()
    error = caught.value.__cause__
    assert isinstance(error, StartError)
    assert (error.phase, error.rank, getattr(caught.value, "cause", None)) == (phase, rank, cause)
    has_tried_again = kind is EngineDead and executor.can_restart
    assert executor.stats().num_restarts == int(has_tried_again)


class StacksOverChannel(MultiprocExecutor):
    """Its ranks send their stacks over the channel, as ranks on other hosts do."""

    def _launch(self, channel: Channel) -> list[Any]:
        handles: list[Any] = list(super()._launch(channel))
        for handle in handles:
            handle.dump_stacks = partial(channel.send_to_heartbeat, handle.rank, DumpStacks())
        return handles


def test_the_stacks_of_a_rank_on_another_host_that_hangs_in_its_start_are_in_the_engines_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = msgspec.structs.replace(SHORT, phase_s={**PATIENT, "load_model": 0.5}, dump_s=1.0)
    executor = StacksOverChannel(stub_config("hang-at-start"), worker_module=STUB, limits=limits)
    with pytest.raises(StartError, match="not done within"):
        executor.start()
    executor.shutdown()
    (stacks,) = (text for text in caplog.messages if text.startswith("the stacks of rank 0:"))
    assert "in fault_at" in stacks


class EndedRank:
    """A rank that has sent why it does not start, and has ended. The message arrives after its end is seen."""

    rank = 0

    def __init__(self, channel: Channel) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt_string(zmq.IDENTITY, channel.identity(0))
        self._socket.connect(channel.address)
        self._has_sent = False

    def end(self) -> End:
        if not self._has_sent:
            self._has_sent = True
            failure = Failure(kind="ModelError", message="there is no model")
            self._socket.send(encode(StartFailed(phase="load_model", failure=failure)))
        return End("exit status 2", is_killed=False, is_retryable=True)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def test_the_last_message_of_a_rank_counts_though_its_end_is_seen_before() -> None:
    channel = Channel(1, 1, Recorder())
    ended = EndedRank(channel)
    handles: Any = [ended]
    try:
        with pytest.raises(StartError, match="there is no model") as caught:
            Handshake(channel, handles, stub_config(), SHORT, epoch=1, rendezvous="").run()
    finally:
        ended.close()
        channel.close()
    assert (caught.value.phase, caught.value.is_retryable) == ("load_model", False)
