"""Divides the layers of a model into groups that have block tables of their own.

A kind of layers, by its sliding window, needs other blocks of a long sequence than the other kinds. All groups use the same
tensors, so the largest group decides how many there are, and places in smaller groups are wasted. Therefore a kind with
many layers gets several groups. For 7 layers, 2 of them (f) without and 5 (s) with a window:

    layers   s0 s1 s2 f3 s4 s5 f6        groups   f3 f6 | s0 s4 | s1 s5 | s2

The groups of a kind get its layers in turns, so that the stages of a pipeline hold equal parts of each group.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from millrace.executor.wire.kv_layout import KVLayout
from millrace.worker.kv_pool import LayerSpec

logger = logging.getLogger("millrace.worker")

MAX_GROUPS = 8
"""Each block table costs time in every step. There are more groups only if the sizes of the kinds do not divide well."""


def group_layers(specs: list[LayerSpec], plain: KVLayout) -> tuple[list[LayerSpec], KVLayout]:
    """Return the layers of the whole model with their groups, and `plain` with the windows of the groups.

    A function of the model and the configuration alone: all ranks get the same groups.
    """
    kinds: defaultdict[int | None, list[LayerSpec]] = defaultdict(list)
    for spec in specs:
        window = spec.sliding_window
        kinds[None if window is None or window >= plain.max_model_len else window].append(spec)
    if len(kinds) == 1:
        return specs, msgspec.structs.replace(plain, windows=tuple(kinds))
    if len({(spec.num_kv_heads, spec.key_dim, spec.value_dim) for spec in specs}) > 1:
        logger.warning("the layers differ in the sizes of their keys: blocks behind sliding windows are not reused")
        return specs, plain
    num_by_window = {window: len(layers) for window, layers in kinds.items()}
    sizes = range(max(num_by_window.values()), (len(specs) - 1) // MAX_GROUPS, -1)
    layouts = {size: _layout(num_by_window, size, plain) for size in sizes}
    size = min(sizes, key=lambda size: size * layouts[size].num_blocks(plain.max_model_len))
    layout = layouts[size]
    groups: dict[int, int] = {}
    for window, layers in kinds.items():
        first, count = layout.windows.index(window), layout.windows.count(window)
        groups |= {spec.layer_index: first + number % count for number, spec in enumerate(layers)}
    counts = Counter(groups.values())
    logger.info("block tables: %s", ", ".join(f"{counts[n]} layers (window {w})" for n, w in enumerate(layout.windows)))
    return [replace(spec, group=groups[spec.layer_index]) for spec in specs], layout


def _layout(num_by_window: Mapping[int | None, int], size: int, plain: KVLayout) -> KVLayout:
    """Return the layout with groups of at most `size` layers."""
    windows = (window for window, count in num_by_window.items() for _ in range(-(-count // size)))
    return msgspec.structs.replace(plain, windows=tuple(windows))
