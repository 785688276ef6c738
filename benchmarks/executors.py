"""Measures what it costs that the worker is a process of its own: the same work on `uni` and on `mp` with one rank.

Both run in turns. Work, model and threads are those of `benchmarks.generation`. `mp_over_uni` is the median ratio of
tokens per second of the pairs. Other load on the machine hardly changes the other figures: CPU seconds of engine and
worker, their voluntary context switches ("sleeps"), page faults, and the bytes of a step's plan.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

from benchmarks.generation import NUM_REQUESTS, QUICK_REQUESTS, count_tokens, run_offline
from millrace import LLM

NUM_ROUNDS = 12
_FIELDS = {"minor_faults": 7, "user_ticks": 11, "system_ticks": 12}
"""Indices in /proc/<pid>/stat after the name, from 0."""


def measure(url: str, model: Path, num_rounds: int, *, is_quick: bool = False) -> dict[str, Any]:
    """Return all figures of this part. `url` is not used."""
    num_requests = QUICK_REQUESTS if is_quick else NUM_REQUESTS
    with LLM(model=model, device="cpu", executor="uni") as uni, LLM(model=model, device="cpu", executor="mp") as mp:
        for llm in (uni, mp):
            run_offline(llm, 1000, num_requests)
        before = mp.metrics().executor
        pairs = [_run_both(uni, mp, seed, num_requests) for seed in range(num_rounds)]
        after = mp.metrics().executor
    num_tokens = count_tokens(num_requests)
    num_steps = after.num_steps - before.num_steps
    uni_runs, mp_runs = [uni_run for uni_run, _ in pairs], [mp_run for _, mp_run in pairs]
    ratios = [uni_run["seconds"] / mp_run["seconds"] for uni_run, mp_run in pairs]
    return {
        "uni_tokens_per_s": round(num_tokens / statistics.median(run["seconds"] for run in uni_runs), 1),
        "mp_tokens_per_s": round(num_tokens / statistics.median(run["seconds"] for run in mp_runs), 1),
        "mp_over_uni": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "steps_per_run": num_steps / num_rounds,
        "plan_bytes_per_step": round((after.plan_bytes - before.plan_bytes) / num_steps, 1),
        **_medians("uni", uni_runs),
        **_medians("mp", mp_runs),
    }


def _run_both(uni: LLM, mp: LLM, seed: int, num_requests: int) -> tuple[dict[str, float], dict[str, float]]:
    """Run one pair. Which one is first alternates, so that other load on the machine affects both alike."""
    if seed % 2:
        mp_run = _run(mp, seed, num_requests)
        return _run(uni, seed, num_requests), mp_run
    return _run(uni, seed, num_requests), _run(mp, seed, num_requests)


def _medians(name: str, runs: list[dict[str, float]]) -> dict[str, float]:
    return {f"{name}_{figure}": round(statistics.median(run[figure] for run in runs), 3) for figure in runs[0]}


def _run(llm: LLM, seed: int, num_requests: int) -> dict[str, float]:
    """Run once. Return the seconds, and what this process and its workers used in that time."""
    pids = [str(os.getpid()), *_worker_pids()]
    before = _usage(pids)
    seconds = run_offline(llm, seed, num_requests)
    return {"seconds": seconds, **{name: after - before[name] for name, after in _usage(pids).items()}}


def _worker_pids() -> list[str]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in children if "millrace.worker" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]


def _usage(pids: list[str]) -> dict[str, float]:
    """Return the usage of all processes together. "sleeps" counts main threads only."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
    faults, user, system = (sum(int(fields[index]) for fields in stats) for index in _FIELDS.values())
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    sleeps = sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return {"cpu_s": (user + system) / os.sysconf("SC_CLK_TCK"), "minor_faults": faults, "sleeps": sleeps}
