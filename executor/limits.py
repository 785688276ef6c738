"""How long things may take before a worker counts as stuck."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits of an executor, in seconds. Tests shorten them."""

    phase_s: dict[str, float] = msgspec.field(
        default_factory=lambda: {"spawn": 60.0, "import": 120.0, "device": 120.0, "load_model": 1800.0}
    )
    """How long a phase of the start may take. The first, "spawn", lasts until `Hello`."""
    placement_s: float = 120.0
    """What Ray gets to place the ranks, or to make room for them by adding nodes."""
    replacement_s: float = 20.0
    """The same when ranks were lost: with what is not back by then, others may go on meanwhile."""
    call_s: float = 60.0
    """For a call without a limit of its own."""
    pool_call_s: float = 900.0
    """For the calls that profile, allocate or capture graphs."""
    sleep_call_s: float = 60.0
    """For falling asleep and waking up, besides what the weights take that move meanwhile."""
    move_bytes_per_s: float = 2.0**30
    """What is expected at least of weights on their way between device and host memory, all ranks together."""
    read_bytes_per_s: float = 2.0**27
    """The same of weights that are read again from disk, after level 2: as slow as a shared disk with nothing cached."""
    step_s: float = 300.0
    """For a step without a limit of its own."""
    stuck_s: float = 10.0
    """A step that lasts longer than this, and than `stuck_factor` times what is usual, is stuck."""
    stuck_factor: float = 20.0
    first_step_s: float = 60.0
    """Instead of `stuck_s` for the first steps of a life, which may compile kernels."""
    longest_step_s: float = 240.0
    """The most that a busy worker is ever given, and what a CPU gets for the first steps: a long prompt takes its time."""
    heartbeat_s: float = 10.0
    """Without a heartbeat for so long, a worker that has no call under way is stuck."""
    busy_heartbeat_s: float = 60.0
    """The same during the start and during calls, where imports and compilers may hold the interpreter."""
    dump_s: float = 0.3
    """What each worker gets to write its stacks before a group with a stuck one is killed."""
    shutdown_s: float = 5.0
    """For an orderly end, and again after SIGTERM."""
