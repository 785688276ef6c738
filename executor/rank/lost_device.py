"""What a process keeps after it has lost its GPU.

When pinned memory is freed that the GPU has read or written, torch records an event. On a lost GPU that fails in a
destructor, so the process ends by SIGABRT, and nobody learns of the error. The frames of the error, and the worker, hold
such memory.
"""

from __future__ import annotations

_kept: list[object] = []


def keep_to_the_end(*objects: object) -> None:
    """Keep objects alive for as long as this process."""
    _kept.extend(objects)
