"""Writes docs/performance.md, and the plots beside it, from the JSON files in benchmarks/results.

There is a section for each machine. For each part of the benchmarks the newest file of that machine counts. Parts that were
not measured, or measured with --quick, are left out.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

from benchmarks.environment import ROOT
from benchmarks.step_times import BATCH, CONTEXT, PHASES

mpl.use("Agg")
mpl.rcParams.update({"svg.hashsalt": "millrace", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})
from matplotlib import pyplot as plt  # noqa: E402, the backend comes first

Figures = dict[str, Any]


class Section(NamedTuple):
    """How one part of the benchmarks is shown."""

    title: str
    note: str
    keys: Sequence[str]
    """What the names of the figures mean, from the outermost table to the innermost."""
    columns: Mapping[str, str]
    """By heading: a template of the figures. A figure that is missing leaves its cell empty."""


RATE = "{tokens_per_s:.0f} ({low:.0f} to {high:.0f})"
INTERVAL = "({{{0}_interval[0]:.3f}} to {{{0}_interval[1]:.3f}})"
START = {"first token after s": "{start_to_first_token_s:.1f}"}
MEMORY = {"peak MiB": "{peak_memory_mib:.0f}"}
SHARE = {"share of the roofline": "{roofline_share:.0%}"}
SECTIONS = {
    "peers": Section(
        "Other engines on the same cores",
        "",
        ("workload", "engine"),
        {
            "tokens/s": RATE,
            "ms per decode step": "{ms_per_step:.2f} ({low:.2f} to {high:.2f})",
            "Millrace / engine": f"{{millrace_over:.2f}} x {INTERVAL.format('millrace_over')}",
            **START,
            **MEMORY,
            "versions": "{versions}",
        },
    ),
    "offline": Section(
        "`LLM` without Redis",
        "`mp_random` draws with temperature 0.8 and top-p 0.95. The least prefill computes what all prompts share once.",
        ("workload", "executor"),
        {
            "tokens/s": RATE,
            "of mp": "{over_mp:.2f} x",
            **SHARE,
            **START,
            **MEMORY,
            "after 1 round": "{peak_memory_mib_of_round_1:.0f}",
            "prefill tokens": "{prefill_tokens:.0f}",
            "of the least": "{prefill_over_least:.2f} x",
        },
    ),
    "service": Section(
        "Through Redis",
        "",
        ("workload", "path"),
        {
            "tokens/s": RATE,
            "of offline": f"{{over_offline:.3f}} x {INTERVAL.format('over_offline')}",
            **START,
            "idle CPU": "{idle_cpu_share_of_a_core:.1%} of a core",
        },
    ),
    "step": Section(
        "One decode step of a service",
        "Milliseconds, llama-15m in float32. `device` is the worker's time; the other phases are the engine's. "
        "With run-ahead they overlap.",
        ("sequences x context",),
        {
            **{name: f"{{{name}_ms:.3f}}" for name in ("step", "device", *PHASES)},
            "tokens/s": "{tokens_per_s:.0f}",
            **SHARE,
        },
    ),
    "kernels": Section(
        "Kernels",
        "GFLOP/s or GB/s, and how many times as fast as torch with as many threads. Small operands are in the cache.",
        ("instruction set and threads", "kernel"),
        {"GFLOP/s": "{gflops:.1f}", "GB/s": "{gb_per_s:.1f}", "us": "{us:.1f}", "over torch": "{over_torch:.2f} x"},
    ),
}
INTRODUCTION = """\
# Performance

`make report` writes this page from the files in [benchmarks/results](../benchmarks/results). Models have random weights,
so the tokens mean nothing, but the work is real. [benchmarks/workloads.py](../benchmarks/workloads.py) describes the
workloads. Engines run in turns on the same cores. Figures are medians over the rounds. Ratios are medians of the ratios of
each round, with an interval that holds the true median with 95 % confidence (with fewer than 6 rounds: the range of all).
"""


class Source(NamedTuple):
    """The newest figures of one part on one machine."""

    path: Path
    result: Figures
    figures: Figures


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
    for old in plots.glob("*.svg"):
        old.unlink()
    lines = [INTRODUCTION]
    for name, sources in by_machine.items():
        lines += _machine(name, sources, plots)
    if not by_machine:
        lines.append("Nothing has been measured yet.")
    page.write_text("\n".join(lines).rstrip() + "\n")
    return len(by_machine)


def _newest(results: Path) -> dict[str, dict[str, Source]]:
    """Return the sources by machine and part."""
    read = [(path, json.loads(path.read_text())) for path in sorted(results.glob("*.json"))]
    dated = sorted(((path, one) for path, one in read if "created" in one), key=lambda pair: pair[1]["created"])
    found: dict[str, dict[str, Source]] = {}
    for path, result in dated:
        machine = result["machine"]
        sets = " ".join(machine["instruction_sets"]) or "no vector instructions known"
        name = f"{machine['cpu']}, {machine['usable_cores']} cores ({sets}), {machine['memory_gib']:.0f} GiB"
        for part in SECTIONS:
            if result.get(part) and not result.get("is_quick"):
                found.setdefault(name, {})[part] = Source(path, result, result[part])
    return found


def _machine(name: str, sources: Mapping[str, Source], plots: Path) -> Iterator[str]:
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    yield f"## {name}\n"
    origins = ((part, *_origin(source)) for part, source in sources.items())
    yield from _table(("part", "file", "commit", "date", "measured rates of the machine"), origins)
    for part, section in SECTIONS.items():
        if part in sources:
            figures = sources[part].figures
            yield f"### {section.title}\n"
            if section.note:
                yield f"{section.note}\n"
            rows = ((*keys, *_cells(section, leaf)) for keys, leaf in _leaves(figures))
            yield from _table((*section.keys, *section.columns), rows)
            if part in PLOTS:
                PLOTS[part](figures).savefig(plots / f"{slug}-{part}.svg", metadata={"Date": None})
                plt.close("all")
                yield f"![{section.title}]({plots.name}/{slug}-{part}.svg)\n"


def _origin(source: Source) -> Iterator[str]:
    result = source.result
    yield source.path.name
    yield (result["commit"] or "unknown")[:12] + (" and changes" if result["is_dirty"] else "")
    yield result["created"][:10]
    rates = result.get("rates", {})
    units = {"read_gb_per_s": "GB/s read", "float32_gflops": "GFLOP/s float32", "bfloat16_gflops": "GFLOP/s bfloat16"}
    yield ", ".join(f"{rates[name]:g} {unit}" for name, unit in units.items() if name in rates)


def _leaves(figures: Figures, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Figures]]:
    """Yield the innermost tables of figures with their names."""
    for name, inner in figures.items():
        if any(isinstance(value, dict) for key, value in inner.items() if key != "versions"):
            yield from _leaves(inner, (*keys, name))
        else:
            yield (*keys, name), inner


def _cells(section: Section, leaf: Figures) -> Iterator[str]:
    if "failed" in leaf:
        yield "failed"
        return
    each = leaf.get("ms_per_step_of_each_round") or leaf.get("tokens_per_s_of_each_round") or [0]
    versions = ", ".join(" ".join(pair) for pair in leaf.get("versions", {}).items())
    known = {**leaf, "low": min(each), "high": max(each), "versions": versions}
    for template in section.columns.values():
        try:
            yield template.format_map(known)
        except KeyError:
            yield ""


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    names = list(heads)
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    for row in rows:
        cells = list(row)
        yield f"| {' | '.join(cells + [''] * (len(names) - len(cells)))} |"
    yield ""


def _plot_peers(figures: Figures) -> Any:
    """Plot the engines of each workload beside each other."""
    figure, axes = plt.subplots(1, len(figures), figsize=(2.6 * len(figures), 3), squeeze=False, layout="tight")
    for axis, (workload, engines) in zip(axes[0], figures.items(), strict=True):
        is_time = any("ms_per_step" in one for one in engines.values())
        rate = "ms_per_step" if is_time else "tokens_per_s"
        rates = {name: one[rate] for name, one in engines.items() if rate in one}
        axis.bar(range(len(rates)), list(rates.values()), color=[f"C{list(engines).index(name)}" for name in rates])
        axis.set_xticks(range(len(rates)), list(rates), rotation=60, ha="right")
        axis.set_title(f"{workload}, " + ("ms per step" if is_time else "tokens/s"))
    return figure


def _plot_steps(figures: Figures) -> Any:
    """Plot tokens per second by sequences and by context, and the engine's phases of a step by sequences."""
    cases = sorted((tuple(map(int, case.split("x"))), one) for case, one in figures.items())
    by_batch = {batch: one for (batch, context), one in cases if context == CONTEXT}
    by_context = {context: one for (batch, context), one in cases if batch == BATCH}
    curves = (f"sequences, context {CONTEXT}", by_batch), (f"context, {BATCH} sequences", by_context)
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="tight")
    for axis, (label, points) in zip(axes, curves, strict=False):
        if points:
            axis.plot(list(points), [one["tokens_per_s"] for one in points.values()], "o-", label="measured")
            bounds = [one["tokens_per_s"] / max(one["roofline_share"], 1e-3) for one in points.values()]
            axis.plot(list(points), bounds, "--", label="roofline")
            axis.set(xscale="log", yscale="log", xlabel=label, ylabel="tokens/s")
            axis.set_xticks(list(points), map(str, points), rotation=45, minor=False)
            axis.minorticks_off()
            axis.legend()
    bottoms = [0.0] * len(by_batch)
    for name in (one for one in PHASES if one != "wait"):
        heights = [one[f"{name}_ms"] for one in by_batch.values()]
        axes[2].bar([str(batch) for batch in by_batch], heights, bottom=bottoms, label=name)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    axes[2].set(xlabel="sequences", ylabel="the engine's time, ms")
    axes[2].legend()
    return figure


PLOTS = {"peers": _plot_peers, "step": _plot_steps}

if __name__ == "__main__":
    main()
