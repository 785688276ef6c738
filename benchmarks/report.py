"""Writes docs/performance.md, and the plots beside it, from the JSON files in benchmarks/results.

There is a section for each machine. For each part of the benchmarks the newest file of that machine counts. Parts that were
not measured, or measured with --quick, are left out.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

from benchmarks.environment import ROOT
from benchmarks.step_times import BATCH, CONTEXT, PHASES

mpl.use("Agg")
mpl.rcParams.update({"svg.hashsalt": "millrace", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})
from matplotlib import pyplot as plt  # noqa: E402, the backend comes first

PARTS = ("peers", "offline", "service", "step", "kernels")
INTRODUCTION = """\
# Performance

`make report` writes this page from the files in [benchmarks/results](../benchmarks/results). Models have random weights,
so the tokens mean nothing, but the work is real. [benchmarks/workloads.py](../benchmarks/workloads.py) describes the
workloads. Engines run in turns on the same cores. Figures are medians over the rounds. Ratios are medians of the ratios of
each round, with an interval that holds the true median with 95 % confidence (with fewer than 6 rounds: the range of all).
"""

Figures = dict[str, Any]


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
        for part in PARTS:
            if result.get(part) and not result.get("is_quick"):
                found.setdefault(name, {})[part] = Source(path, result, result[part])
    return found


def _machine(name: str, sources: Mapping[str, Source], plots: Path) -> Iterator[str]:
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    yield f"## {name}\n"
    yield from _table(
        ("part", "file", "commit", "date", "measured rates of the machine"),
        ((part, *_origin(source)) for part, source in sources.items()),
    )
    sections: dict[str, Callable[[Figures, Path], Iterator[str]]] = {
        "peers": _peers,
        "offline": _offline,
        "service": _service,
        "step": _steps,
        "kernels": _kernels,
    }
    for part, section in sections.items():
        if part in sources:
            yield from section(sources[part].figures, plots / f"{slug}-{part}.svg")


def _origin(source: Source) -> Iterator[str]:
    result = source.result
    yield source.path.name
    yield (result["commit"] or "unknown")[:12] + (" and changes" if result["is_dirty"] else "")
    yield result["created"][:10]
    rates = result.get("rates", {})
    units = {"read_gb_per_s": "GB/s read", "float32_gflops": "GFLOP/s float32", "bfloat16_gflops": "GFLOP/s bfloat16"}
    yield ", ".join(f"{rates[name]:g} {unit}" for name, unit in units.items() if name in rates)


def _peers(figures: Figures, plot: Path) -> Iterator[str]:
    yield "### Other engines on the same cores\n"
    for workload, engines in figures.items():
        yield f"{workload}:\n"
        unit = "ms per decode step" if any("ms_per_step" in one for one in engines.values()) else "tokens/s"
        heads = ("engine", unit, "Millrace is faster by", "first token after s", "peak MiB", "versions")
        yield from _table(heads, (_peer(name, one) for name, one in engines.items()))
    measured = {name: {k: r for k, one in e.items() if (r := _rate(one))} for name, e in figures.items()}
    shown = {name: rates for name, rates in measured.items() if rates}
    if not shown:
        return
    figure, axes = plt.subplots(1, len(shown), figsize=(2.6 * len(shown), 3), squeeze=False)
    for axis, (workload, rates) in zip(axes[0], shown.items(), strict=True):
        is_time = any("ms_per_step" in one for one in figures[workload].values())
        axis.bar(range(len(rates)), list(rates.values()), color=[f"C{list(rates).index(one)}" for one in rates])
        axis.set_xticks(range(len(rates)), list(rates), rotation=60, ha="right")
        axis.set_title(f"{workload}, " + ("ms per step" if is_time else "tokens/s"))
    yield _save(figure, plot, "each engine's figures, by workload")


def _peer(name: str, one: Figures) -> Iterator[str]:
    yield name
    if "failed" in one:
        yield "failed"
        return
    yield _with_range(one)
    ratio, (low, high) = one.get("millrace_over"), one.get("millrace_over_interval", (0, 0))
    yield "" if ratio is None else f"{ratio:.2f} x ({low:.2f} to {high:.2f})"
    yield f"{one['start_to_first_token_s']:.1f}"
    yield f"{one['peak_memory_mib']}"
    yield ", ".join(f"{key} {value}" for key, value in one.items() if isinstance(value, str))


def _offline(figures: Figures, plot: Path) -> Iterator[str]:
    yield "### `LLM` without Redis\n"
    heads = ("workload", "executor", "tokens/s", "share of the roofline", "first token after s", "peak MiB")
    yield from _table(
        (*heads, "peak MiB, 1 round", "prefill tokens", "of the least"),
        (
            (
                *(workload, name, _with_range(one), f"{one['roofline_share']:.0%}"),
                *(f"{one['start_to_first_token_s']:.1f}", one["peak_memory_mib"], one["peak_memory_mib_of_round_1"]),
                *(f"{one['prefill_tokens']:.0f}", f"{one['prefill_over_least']:.2f} x"),
            )
            for workload, executors in figures.items()
            for name, one in executors.items()
            if "failed" not in one
        ),
    )
    yield "The least prefill computes what all prompts of a workload share once. `mp_random` draws with temperature 0.8 and"
    yield "top-p 0.95: " + "; ".join(
        f"{workload}: {one['over_mp']:.2f} x greedy"
        for workload, executors in figures.items()
        if "over_mp" in (one := executors.get("mp_random", {}))
    )
    yield ""


def _service(figures: Figures, plot: Path) -> Iterator[str]:
    yield "### Through Redis\n"
    yield from _table(
        ("workload", "through Redis, tokens/s", "offline, tokens/s", "ratio", "first token after s", "idle CPU"),
        (
            (
                *(workload, _with_range(both["redis"]), _with_range(both["offline"])),
                "{:.3f} ({:.3f} to {:.3f})".format(
                    both["redis"]["over_offline"], *both["redis"]["over_offline_interval"]
                ),
                f"{both['redis']['start_to_first_token_s']:.1f}",
                f"{both['redis']['idle_cpu_share_of_a_core']:.1%} of a core",
            )
            for workload, both in figures.items()
            if "over_offline" in both["redis"]
        ),
    )


def _steps(figures: Figures, plot: Path) -> Iterator[str]:
    yield "### One decode step of a service\n"
    yield "Milliseconds, llama-15m in float32. `device` is the worker's time; the other phases are the engine's. With"
    yield "run-ahead they overlap.\n"
    names = ("step", "device", *PHASES)
    yield from _table(
        ("sequences x context", *names, "tokens/s", "share of the roofline"),
        (
            (
                case.replace("x", " x "),
                *(f"{one[f'{name}_ms']:.3f}" for name in names),
                one["tokens_per_s"],
                f"{one['roofline_share']:.0%}",
            )
            for case, one in figures.items()
        ),
    )
    cases = {tuple(map(int, case.split("x"))): one for case, one in figures.items()}
    by_batch = {batch: one for (batch, context), one in cases.items() if context == CONTEXT}
    by_context = {context: one for (batch, context), one in sorted(cases.items()) if batch == BATCH}
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2))
    for axis, label, points in ((axes[0], "sequences", by_batch), (axes[1], "context", by_context)):
        if not points:
            continue
        axis.plot(list(points), [one["tokens_per_s"] for one in points.values()], "o-", label="measured")
        bounds = [one["tokens_per_s"] / one["roofline_share"] for one in points.values() if one["roofline_share"]]
        if len(bounds) == len(points):
            axis.plot(list(points), bounds, "--", label="roofline")
        axis.set(xscale="log", yscale="log", xlabel=label, ylabel="tokens/s")
        axis.legend()
    bottoms = [0.0] * len(by_batch)
    for name in (one for one in PHASES if one != "wait"):
        heights = [one[f"{name}_ms"] for one in by_batch.values()]
        axes[2].bar([str(batch) for batch in by_batch], heights, bottom=bottoms, label=name)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    axes[2].set(xlabel="sequences", ylabel="the engine's time, ms")
    axes[2].legend()
    yield _save(
        figure, plot, f"tokens/s by sequences (context {CONTEXT}) and by context ({BATCH} sequences); step time"
    )


def _kernels(figures: Figures, plot: Path) -> Iterator[str]:
    yield "### Kernels\n"
    yield "Rates, and how many times as fast as torch with the same number of threads. Small operands are in the cache.\n"
    columns = [name for name in figures if not name.startswith("none")] or list(figures)
    yield from _table(
        ("kernel", "unit", *(name.replace("_", " ") for name in columns)),
        (
            (kernel, unit.replace("_per_", "/"), *(_kernel(figures[name].get(kernel), unit) for name in columns))
            for kernel, first in figures[columns[0]].items()
            for unit in first.keys() & {"gflops", "gb_per_s"}
        ),
    )


def _kernel(one: Figures | None, unit: str) -> str:
    return "" if one is None else f"{one[unit]:g} ({one['over_torch']:.2f} x)"


def _rate(one: Figures) -> float | None:
    rate: float | None = one.get("ms_per_step", one.get("tokens_per_s"))
    return rate


def _with_range(one: Figures) -> str:
    """Return the median of a figure and the range of its rounds."""
    name = "ms_per_step" if "ms_per_step" in one else "tokens_per_s"
    digits, each = (2 if name == "ms_per_step" else 0), one[f"{name}_of_each_round"]
    return f"{one[name]:.{digits}f} ({min(each):.{digits}f} to {max(each):.{digits}f})"


def _table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    names = list(heads)
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"
    yield ""


def _save(figure: Any, plot: Path, text: str) -> str:
    figure.tight_layout()
    figure.savefig(plot, metadata={"Date": None})
    plt.close(figure)
    return f"![{text}]({plot.parent.name}/{plot.name})\n"


if __name__ == "__main__":
    main()
