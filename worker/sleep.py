"""What a sleeping rank gives up, and how it is sure to wake up with the same weights.

    level 1    weights in host memory     KV pool dropped
    level 2    weights dropped, read again on waking     KV pool dropped

On a CPU the weights are in host memory anyway: level 1 gives up the KV pool alone.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from millrace.worker.errors import ConfigError, WeightsChanged
from millrace.worker.loading.checksum import checksums

LEVELS = (1, 2)
WAKE_TAGS = ("weights", "kv_cache")


def check_level(level: int) -> None:
    if level not in LEVELS:
        raise ConfigError(f"sleep level {level!r} is unknown: use 1 (weights to host memory) or 2 (weights dropped)")


def check_tags(tags: list[str] | None) -> set[str]:
    """What to wake up; None is all of it."""
    unknown = set(tags or ()) - set(WAKE_TAGS)
    if unknown:
        raise ConfigError(f"there is no {', '.join(sorted(unknown))} to wake up: use {' or '.join(WAKE_TAGS)}")
    return set(WAKE_TAGS if tags is None else tags)


def check_unchanged(model: PreTrainedModel, before: dict[str, int]) -> None:
    """Raise `WeightsChanged` unless the model's tensors are those that the checksums were made of."""
    now = checksums(model)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if changed:
        raise WeightsChanged(
            f"{len(changed)} of {len(before)} tensors are not what they were before the sleep, first of all {changed[0]}: "
            "restart the engine, with the model's files as they were when it started"
        )
