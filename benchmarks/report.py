"""Writes docs/performance.md, and the plots beside it, from the JSON files in benchmarks/results.

There is a section for each machine. For each part of the benchmarks the newest figures of that machine are shown: a table
for each file that holds a row, such as an engine in a workload, that no newer file has. Parts that were not measured, or
measured with --quick, are left out.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.environment import ROOT
from benchmarks.step_times import BATCH, CONTEXT, PHASES

Figures = dict[str, Any]


class Section(NamedTuple):
    """How one part of the benchmarks is shown."""

    title: str
    keys: Sequence[str]
    """What the names of the figures mean, from the outermost table to the innermost."""
    columns: Sequence[str]
    """The figures that are shown, in this order. Those that no row has are left out."""
    note: str = ""


RUN = ("tokens_per_s", "start_to_first_token_s", "peak_memory_mib")
SECTIONS = {
    "peers": Section(
        "Other engines on the same cores",
        ("workload", "engine"),
        ("millrace_over", "ms_per_step", *RUN, "num_rounds"),
        "`millrace over` is the ratio of the speeds, above 1 where Millrace is faster. STEP1 and STEP256 are the times of a "
        "decode step for 1 and 256 sequences.",
    ),
    "offline": Section(
        "`LLM` without Redis",
        ("workload", "executor"),
        ("over_mp", *RUN, "peak_memory_mib_of_round_1", "prefill_tokens", "prefill_over_least", "roofline_share"),
        "`mp_random` draws with temperature 0.8 and top-p 0.95. The least prefill computes what all prompts share once. The "
        "roofline is what the measured rates of the machine allow.",
    ),
    "service": Section(
        "Through Redis",
        ("workload", "path"),
        ("over_offline", *RUN, "idle_cpu_share_of_a_core"),
        "The peak memory of `redis` is that of the service and its workers. Before 2026-11-24 it included the client's 50 "
        "MiB.",
    ),
    "step": Section(
        "One decode step of a service",
        ("sequences x context",),
        (*(f"{name}_ms" for name in ("step", "device", *PHASES)), "tokens_per_s", "roofline_share"),
        "llama-15m in float32. `device` is the worker's time; the other phases are the engine's. They may overlap.",
    ),
    "kernels": Section(
        "Kernels",
        ("instruction set and threads", "kernel"),
        ("gflops", "gb_per_s", "us", "over_torch"),
        "`over torch`: how many times as fast as torch with as many threads. Small operands are in the cache.",
    ),
    "throughput": Section(
        "256 requests to a model of 600 million parameters on a GPU",
        ("engine",),
        ("tokens_per_s", "device_idle_share", "start_to_first_token_s", "num_rounds"),
        "Workload NANO: prompts and outputs of 100 to 1,024 tokens, bfloat16, temperature 0.6, `LLM`. `uni`: in one "
        "process, as all are in the files before 2026-11-27-h200-decodes.json. `fp8-kv`: with a KV pool in fp8, whose "
        "decode rows have faster tiles since that file. `batch-invariant`: with `batch_invariant=True`. `transformers` is "
        "its continuous batching, stopped after 22 s; the tokens so far count. `budget-4096`: with "
        "`max_num_batched_tokens=4096`. `eager`: without graphs. The first start on a machine compiles Triton's kernels.",
    ),
    "large": Section(
        "The same requests to a model of 14 billion parameters on a GPU",
        ("workload",),
        ("tokens_per_s", "device_idle_share", "start_to_first_token_s", "num_rounds"),
    ),
    "redis": Section(
        "The first workload through Redis and offline, on a GPU",
        ("path",),
        ("tokens_per_s", "start_to_first_token_s", "num_rounds"),
        "In the first offline round of 2026-11-27-h200-tiles.json graphs were still captured.",
    ),
    "steps": Section(
        "Decode steps of this model at 1,024 positions",
        ("step",),
        ("step_ms", "idle_share", "tokens_per_s", "roofline_share"),
        "From 2026-11-27-h200-head.json on without the launch of the first of 20 steps, for which the device had waited: "
        "some 20 us of each. From 2026-11-27-h200-restarts.json on decode attention has 2 warps.",
    ),
    "attention": Section(
        "Attention of one layer on a GPU",
        ("case",),
        ("device_us", "gb_per_s", "over_copy", "tflops", "max_error"),
        "16 heads of queries and 8 of keys, bfloat16. `over copy`: relative to the bandwidth of a copy.",
    ),
    "sampling": Section("Draws from 256 rows of 151,936 logits on a GPU", ("kind",), ("device_us", "as_on_cpu")),
    "restarts": Section(
        "Starts, and a worker that is killed under load, on a GPU",
        ("case",),
        ("start_to_first_token_s", "next_token_s", "memory_mib"),
        "The model of 600 million parameters, 32 sequences when the worker is killed. From the start to the first token, "
        "from the kill to the next one, and the memory of the GPU behind the last of 10 kills.",
    ),
    "sleep": Section(
        "Sleep of a worker on a GPU", ("level",), ("sleep_s", "wake_s", "next_token_s", "memory_left_mib")
    ),
}
INTRODUCTION = """\
# Performance

`make report` writes this page from the files in [benchmarks/results](../benchmarks/results). Models have random weights,
so the tokens mean nothing, but the work is real. [benchmarks/workloads.py](../benchmarks/workloads.py) describes the
workloads: W1 has 256 requests of mixed lengths to a model of 15 million parameters, W2 has 32 to one of 600 million,
W3 has 128 requests to the small model that share a prefix of 512 tokens, and W4 has 32 to it of 3,000 to 3,900 tokens.
W5 has the lengths of W2, to a model of 800 million three quarters of whose layers are recurrent. W6 is W2 with weights in
4 bits (GPTQ).

Engines run in turns on the same cores, each after a warm-up of 64 short requests that does not count. Figures are medians
over the rounds, with the range of all rounds. Ratios are medians of the ratios of each round, with an interval that holds
the true median with 95 % confidence (with fewer than 6 rounds: the range of all).
"""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "performance.md", metavar="FILE")
    options = parser.parse_args()
    print(f"wrote {options.out}: {write(options.results, options.out)} machines")


def write(results: Path, page: Path) -> int:
    """Write the page and its plots. Return the number of machines."""
    by_machine = _newest(results)
    plots = page.with_suffix("")
    plots.mkdir(parents=True, exist_ok=True)
    for old in plots.glob("*.png"):
        old.unlink()
    lines = [INTRODUCTION]
    for name, newest in by_machine.items():
        lines += _machine(name, newest, plots)
    if not by_machine:
        lines.append("Nothing has been measured yet.")
    page.write_text("\n".join(lines).rstrip() + "\n")
    return len(by_machine)


def _newest(results: Path) -> dict[str, dict[str, list[Figures]]]:
    """Return the results that count, by machine and part, newest first, with the names of their files."""
    read = [json.loads(path.read_text()) | {"file": path.name} for path in sorted(results.glob("*.json"))]
    found: dict[str, dict[str, list[Figures]]] = {}
    shown: set[tuple[str, ...]] = set()
    for result in sorted(read, key=lambda result: str(result.get("created")), reverse=True):
        for part in SECTIONS:
            if result.get(part) and not result.get("is_quick"):
                machine = _machine_name(result["machine"])
                rows = {(machine, part, *keys) for keys, _ in _leaves(result[part])}
                if not rows <= shown:
                    found.setdefault(machine, {}).setdefault(part, []).append(result)
                shown |= rows
    return found


def _machine_name(machine: Figures) -> str:
    if machine.get("gpus"):
        return ", ".join(gpu["name"] for gpu in machine["gpus"])
    sets = " ".join(machine["instruction_sets"]) or "no vector instructions known"
    return f"{machine['cpu']}, {machine['usable_cores']} cores ({sets}), {machine['memory_gib']:.0f} GiB"


def _machine(name: str, results: Mapping[str, Sequence[Figures]], plots: Path) -> Iterator[str]:
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    yield f"## {name}\n"
    heads = ("part", "file", "commit", "date", "measured rates of the machine", "versions")
    yield from _table(heads, ((part, *_origin(one, part)) for part, each in results.items() for one in each))
    for part, section in SECTIONS.items():
        if part not in results:
            continue
        yield f"### {section.title}\n"
        if part in PLOTS:
            figure = PLOTS[part](_merged(results[part], part))
            figure.savefig(plots / f"{slug}-{part}.png")
            _pyplot().close(figure)
            yield f"![{section.title}]({plots.name}/{slug}-{part}.png)\n"
        if section.note:
            yield f"{section.note}\n"
        for result in results[part]:
            if len(results[part]) > 1:
                yield f"From {result['file']}:\n"
            leaves = list(_leaves(result[part]))
            columns = [name for name in section.columns if any(name in leaf for _, leaf in leaves)]
            shown = [(keys, leaf) for keys, leaf in leaves if leaf.keys() & {"failed", *columns}]
            rows = ((*keys, *_cells(leaf, columns)) for keys, leaf in shown)
            yield from _table([name.replace("_", " ") for name in (*section.keys, *columns)], rows)


def _merged(results: Sequence[Figures], part: str) -> Figures:
    """Return the figures of all results, the newest ones where several have them."""
    merged: Figures = {}
    for result in reversed(results):
        for name, inner in result[part].items():
            merged[name] = merged.get(name, {}) | inner
    return merged


def _origin(result: Figures, part: str) -> Iterator[str]:
    yield result["file"]
    yield (result["commit"] or "unknown")[:12] + (" and changes" if result["is_dirty"] else "")
    yield result["created"][:10]
    rates = result.get("rates", {})
    units = {"read_gb_per_s": "GB/s read", "float32_gflops": "GFLOP/s float32", "bfloat16_gflops": "GFLOP/s bfloat16"}
    yield ", ".join(f"{rates[name]:g} {unit}" for name, unit in units.items() if name in rates)
    versions = [leaf.get("versions", {}).items() for _, leaf in _leaves(result[part])]
    yield ", ".join(sorted({f"{name} {version}" for one in versions for name, version in one}))


def _leaves(figures: Figures, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Figures]]:
    """Yield the innermost tables of figures with their names."""
    for name, inner in figures.items():
        if not isinstance(inner, dict):
            continue
        if any(isinstance(value, dict) for key, value in inner.items() if key not in DETAILS):
            yield from _leaves(inner, (*keys, name))
        else:
            yield (*keys, name), inner


def _cells(leaf: Figures, columns: Sequence[str]) -> Iterator[str]:
    """Yield the figures with their ranges or intervals."""
    if "failed" in leaf:
        yield "failed"
        return
    for name in columns:
        bounds = leaf.get(f"{name}_of_each_round") or leaf.get(f"{name}_interval")
        interval = f" ({_number(min(bounds))} to {_number(max(bounds))})" if bounds else ""
        value = leaf.get(name, "")
        yield value if isinstance(value, str) else _number(value) + interval


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


@cache
def _pyplot() -> Any:
    """Import matplotlib once there is something to plot: it takes long, and each test process imports this module."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update(
        {"font.size": 9, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3, "savefig.dpi": 100}
    )
    from matplotlib import pyplot

    return pyplot


def _plot_peers(figures: Figures) -> Any:
    """Plot the speeds of the engines relative to Millrace's, by workload."""
    engines = list(dict.fromkeys(name for of_engine in figures.values() for name in of_engine if name != "millrace"))
    figure, axis = _pyplot().subplots(figsize=(8, 3.2), layout="tight")
    width = 0.8 / max(1, len(engines))
    for number, engine in enumerate(engines):
        ratios = [of_engine.get(engine, {}).get("millrace_over") for of_engine in figures.values()]
        places = [place + (number - (len(engines) - 1) / 2) * width for place in range(len(figures))]
        axis.bar(places, [1 / ratio if ratio else 0 for ratio in ratios], width, label=engine)
    axis.axhline(1, color="black", label="millrace")
    axis.set_xticks(range(len(figures)), list(figures))
    axis.set_ylabel("speed / Millrace's speed")
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _plot_steps(figures: Figures) -> Any:
    """Plot tokens per second by sequences and by context, and the phases of a step by sequences."""
    cases = sorted((*map(int, case.split("x")), one) for case, one in figures.items())
    by_batch = {batch: one for batch, context, one in cases if context == CONTEXT}
    by_context = {context: one for batch, context, one in cases if batch == BATCH}
    figure, axes = _pyplot().subplots(1, 3, figsize=(11, 3.2), layout="tight")
    for axis, label, points in zip(axes, ("sequences", "context"), (by_batch, by_context), strict=False):
        rates = [one["tokens_per_s"] for one in points.values()]
        axis.loglog(list(points), rates, "o-", label="measured")
        bounds = [rate / max(one["roofline_share"], 1e-3) for rate, one in zip(rates, points.values(), strict=True)]
        axis.loglog(list(points), bounds, "--", label="roofline")
        axis.set(xlabel=label, ylabel="tokens/s")
        axis.set_xticks(list(points), map(str, points), rotation=45)
        axis.minorticks_off()
        axis.legend()
    phases = [name for name in PHASES if name != "wait"]
    heights = [[one[f"{name}_ms"] for one in by_batch.values()] for name in phases]
    axes[2].stackplot([str(batch) for batch in by_batch], heights, labels=phases)
    axes[2].set(xlabel="sequences", ylabel="the engine's time, ms")
    axes[2].legend()
    return figure


DETAILS = ("versions", "kernels_us", "kernels_ms")
"""Tables that are no rows of the page."""
PLOTS = {"peers": _plot_peers, "step": _plot_steps}

if __name__ == "__main__":
    main()
