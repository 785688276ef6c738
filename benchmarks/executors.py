"""What it costs that the worker is a process of its own: the same work on `uni` and on `mp` with one rank, in turns.

Work, model and threads are those of `benchmarks.generation`. The ratio of tokens per second is the median of the pairs'
ratios. Beside it stand counts that neighbours on the machine do not move: CPU seconds of engine and worker, how often they
went to sleep in a step, page faults, and the bytes of a step's plan.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

from benchmarks.generation import make_work, run_offline
from millrace import LLM

NUM_PAIRS = 12
_FIELDS = {"minor_faults": 7, "user_ticks": 11, "system_ticks": 12}
"""Places in /proc/<pid>/stat after the name, from 0."""


def measure(model: Path, num_pairs: int = NUM_PAIRS) -> dict[str, Any]:
    """All figures of this file."""
    with LLM(model=model, device="cpu", executor="uni") as uni, LLM(model=model, device="cpu", executor="mp") as mp:
        for llm in (uni, mp):
            run_offline(llm, seed=1000)
        begun = mp.metrics().executor
        pairs = [_run_both(uni, mp, seed) for seed in range(num_pairs)]
        ended = mp.metrics().executor
    num_tokens = sum(request.sampling.max_tokens or 0 for request in make_work(0))
    num_steps = ended.num_steps - begun.num_steps
    ratios = [one["seconds"] / other["seconds"] for one, other in pairs]
    return {
        "uni_tokens_per_s": round(num_tokens / statistics.median(one["seconds"] for one, _ in pairs), 1),
        "mp_tokens_per_s": round(num_tokens / statistics.median(other["seconds"] for _, other in pairs), 1),
        "mp_over_uni": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "steps_per_run": num_steps / num_pairs,
        "plan_bytes_per_step": round((ended.plan_bytes - begun.plan_bytes) / num_steps, 1),
        **_medians("uni", [one for one, _ in pairs]),
        **_medians("mp", [other for _, other in pairs]),
    }


def _run_both(uni: LLM, mp: LLM, seed: int) -> tuple[dict[str, float], dict[str, float]]:
    """Who begins changes from pair to pair: neighbours on the machine slow down whoever is second as often as the other."""
    if seed % 2:
        second = _run(mp, seed)
        return _run(uni, seed), second
    return _run(uni, seed), _run(mp, seed)


def _medians(name: str, runs: list[dict[str, float]]) -> dict[str, float]:
    return {f"{name}_{what}": round(statistics.median(run[what] for run in runs), 3) for what in runs[0]}


def _run(llm: LLM, seed: int) -> dict[str, float]:
    """One run: seconds, and what this process and its workers have used meanwhile."""
    pids = [str(os.getpid()), *_workers()]
    before = _used(pids)
    seconds = run_offline(llm, seed)
    return {"seconds": seconds, **{name: after - before[name] for name, after in _used(pids).items()}}


def _workers() -> list[str]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in children if "worker" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]


def _used(pids: list[str]) -> dict[str, float]:
    """Of all the processes together; of sleeps, those of their main threads."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
    faults, user, system = (sum(int(one[place]) for one in stats) for place in _FIELDS.values())
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    sleeps = sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return {"cpu_s": (user + system) / os.sysconf("SC_CLK_TCK"), "minor_faults": faults, "sleeps": sleeps}
