"""Measures one decode step of a service, by its phases, for numbers of running sequences and lengths of their contexts.

In the engine's process, per step:
    schedule   make the plan
    encode     encode the plan and send it
    wait       wait for the worker
    decode     receive and decode the result
    apply      the rest of the engine: apply the result, advance the generations
    publish    the rest of the service: events, checkpoints, ends of jobs
`device` is the worker's own time for the step. It overlaps with `wait` and, with run-ahead, with the other phases.
`step` is the time from the end of one step to the end of the next. Medians over the steps in which all sequences decode.

Run as a program it is the service: it writes the times of its steps to a file when it ends.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import roofline
from benchmarks.options import Options
from benchmarks.service import Service, fixed_length
from millrace import GenerationRequest
from millrace.engine_service.core.scheduler import Scheduler
from millrace.engine_service.engine import Engine
from millrace.engine_service.serve import main
from millrace.engine_service.serving.service import Service as EngineService
from millrace.executor.remote import RemoteExecutor
from millrace.executor.wire.calls import PendingCall
from millrace.executor.wire.channel import Channel
from millrace.executor.wire.messages import StepId, StepResult

NUM_ROUNDS = 1
NUM_STEPS, QUICK_STEPS = 64, 16
"""Decode steps of each case, about."""
PROMPT_TOKENS_PER_STEP = 2048
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 128
"""Of the cases that differ in the number of sequences."""
CONTEXTS = (256, 512, 1024, 2048, 4096)
BATCH = 16
"""Of the cases that differ in the context."""
QUICK_CASES = ((1, CONTEXT), (BATCH, CONTEXT))
PHASES = ("schedule", "encode", "wait", "decode", "apply", "publish")
LIMIT_STEPS = 4
"""A case with fewer steps is left out."""


def measure(options: Options) -> dict[str, Any]:
    """Return the figures by case: "<sequences>x<context>"."""
    model, num_steps = options.model, QUICK_STEPS if options.is_quick else NUM_STEPS
    cases = (
        QUICK_CASES if options.is_quick else [*((one, CONTEXT) for one in BATCHES), *((BATCH, one) for one in CONTEXTS)]
    )
    begins_s: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        times = Path(directory, "times.json")
        service = Service(options.url, model, "bench-step", start=("-m", "benchmarks.step_times", str(times)))
        try:
            service.seconds_to_first_token()
            for case in cases:
                begins_s.append(time.monotonic())
                for number in range(options.num_rounds):
                    service.run(_requests(*case, number, num_steps))
        finally:
            service.stop()
        steps = json.loads(times.read_text())
    figures: dict[str, Any] = {}
    for (num_sequences, context), begin_s, end_s in zip(cases, begins_s, [*begins_s[1:], math.inf], strict=True):
        chosen = [one for one in steps if begin_s <= one["end_s"] < end_s and one["rows"] == num_sequences]
        if len(chosen) >= LIMIT_STEPS:
            least_s = roofline.least_step_s(model.name, "float32", num_sequences, context)
            figures[f"{num_sequences}x{context}"] = _medians(chosen, num_sequences, least_s)
    return figures


def _requests(num_sequences: int, context: int, number: int, num_steps: int) -> list[GenerationRequest]:
    """Return jobs whose sequences reach the length `context`, and decode together for about `num_steps` steps."""
    num_output = num_steps + num_sequences * context // PROMPT_TOKENS_PER_STEP
    tokens, num_prompt = random.Random(f"{num_sequences}/{context}/{number}"), max(1, context - num_output)
    return [fixed_length(tokens.choices(range(10, 501), k=num_prompt), num_output) for _ in range(num_sequences)]


def _medians(steps: list[dict[str, float]], num_sequences: int, least_s: float) -> dict[str, Any]:
    median_s = {name: statistics.median(one[name] for one in steps) for name in ("step", "device", *PHASES)}
    return {
        "num_steps": len(steps),
        **{f"{name}_ms": round(1e3 * seconds, 4) for name, seconds in median_s.items()},
        "tokens_per_s": round(num_sequences / median_s["step"], 1),
        "roofline_share": round(least_s / median_s["step"], 3),
    }


class Recorder:
    """Owns the times of a service's steps, and measures them by wrapping the methods of its parts."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._spent_s = dict.fromkeys(("schedule", "encode", "wait", "decode", "engine", "service"), 0.0)
        self._decode_rows: dict[StepId, int] = {}
        """Of the steps in flight whose rows all decode."""
        self._result: StepResult | None = None
        self._last_end_s = 0.0
        self._time(Channel, "wait", "wait")
        self._time(PendingCall, "result", "decode", on_result=self._note_result)
        self._time(RemoteExecutor, "execute_model", "encode")
        self._time(Engine, "step", "engine")
        self._time(Scheduler, "schedule", "schedule", on_result=self._note_plan)
        self._time(EngineService, "_run_once", "service", on_result=self._end_step)

    def _time(self, owner: type, method: str, phase: str, on_result: Callable[[Any], None] | None = None) -> None:
        original, spent_s = getattr(owner, method), self._spent_s

        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            result = original(*args, **kwargs)
            spent_s[phase] += time.perf_counter() - began_s
            if on_result is not None:
                on_result(result)
            return result

        setattr(owner, method, timed)

    def _note_plan(self, plan: Any) -> None:
        if plan is not None and plan.num_tokens == plan.num_sampled:
            self._decode_rows[plan.step_id] = plan.num_sampled

    def _note_result(self, result: Any) -> None:
        if isinstance(result, StepResult):
            self._result = result

    def _end_step(self, _: None) -> None:
        end_s, result, spent_s = time.monotonic(), self._result, self._spent_s
        if result is not None:
            spent_s["decode"] -= spent_s["wait"]
            spent_s["service"] -= spent_s["engine"]
            inner = ("schedule", "encode", "wait", "decode")
            self.steps.append(
                {
                    "end_s": end_s,
                    "rows": self._decode_rows.pop(result.step_id, 0),
                    "step": end_s - self._last_end_s,
                    "device": result.device_s,
                    **{phase: spent_s[phase] for phase in inner},
                    "apply": spent_s["engine"] - sum(spent_s[phase] for phase in inner),
                    "publish": spent_s["service"],
                }
            )
        self._result, self._last_end_s = None, end_s
        spent_s.update(dict.fromkeys(spent_s, 0.0))


if __name__ == "__main__":
    times_path = Path(sys.argv.pop(1))
    recorder = Recorder()
    status = main()
    times_path.write_text(json.dumps(recorder.steps))
    sys.exit(status)
