"""Time limits after which a worker counts as stuck."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The time limits of an executor, in seconds. Tests shorten them."""

    phase_s: dict[str, float] = msgspec.field(
        default_factory=lambda: {"spawn": 60.0, "import": 300.0, "device": 120.0, "load_model": 1800.0}
    )
    """For each phase of the start. The first, "spawn", lasts until `Hello`."""
    placement_s: float = 120.0
    """For Ray to place the ranks. It may have to add nodes for them."""
    replacement_s: float = 20.0
    """The same after ranks were lost. The engine goes on with fewer ranks after that."""
    call_s: float = 60.0
    """For a call without a limit of its own."""
    pool_call_s: float = 900.0
    """For the calls that profile, allocate or capture graphs."""
    sleep_call_s: float = 60.0
    """For `sleep` and `wake_up`, besides the time to move the weights."""
    move_bytes_per_s: float = 2.0**30
    """Least speed of copying weights between device and host memory, of all ranks together."""
    read_bytes_per_s: float = 2.0**27
    """Least speed of reading weights from disk again, after level 2: that of a shared disk with nothing cached."""
    step_s: float = 300.0
    """For the reply to a step. A stuck one ends before that, see the next fields."""
    stuck_s: float = 10.0
    """A step is stuck when it lasts longer than this and longer than `stuck_factor` times the usual step."""
    stuck_factor: float = 20.0
    first_step_s: float = 60.0
    """Instead of `stuck_s` for the first steps after a start, which may compile kernels."""
    longest_step_s: float = 240.0
    """The upper limit of every step, and the limit of the first steps on a CPU, where a long prompt may need it."""
    heartbeat_s: float = 10.0
    """A worker without a heartbeat for this long is stuck, if no call is in progress."""
    busy_heartbeat_s: float = 60.0
    """The same during the start and during calls, when imports and compilers may block the interpreter."""
    dump_s: float = 0.3
    """For each worker to write its stacks, before the workers are killed because one is stuck."""
    shutdown_s: float = 5.0
    """For a worker to end after the message "shutdown", and again after SIGTERM."""
