"""Millrace with its defaults, on the CPU unless asked otherwise: `LLM`, or a service behind Redis."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks import models
from benchmarks.engines import runner
from benchmarks.service import Service, fixed_length
from benchmarks.workloads import Request, Workload
from millrace import LLM, SamplingParams, StructuredOutputs

IDLE_S = 10.0
"""Time in which the CPU time of the idle service is measured."""


class Offline(runner.Engine):
    packages = ("millrace", "torch", "transformers")

    def __init__(
        self,
        path: Path,
        workload: Workload,
        temperature: float = 0.0,
        top_p: float = 1.0,
        num_schemas: int = 0,
        idle_s: float = 0.0,
        other_model: str | None = None,
        **options: Any,
    ) -> None:
        """`other_model`: the name of one that serves the workload in place of its own. `temperature` and `top_p` make it
        sample. The requests take turns with `num_schemas` forms; 0: they are free. It is idle for `idle_s` before the
        rounds: a worker of its own captures graphs then. `options` are those of `LLM`."""
        self._idle_s = idle_s
        path = path if other_model is None else models.find(other_model)
        self._llm = LLM(model=path, max_model_len=workload.max_model_len, **{"device": "cpu", **options})
        self._forms: Sequence[StructuredOutputs | None] = [
            StructuredOutputs(json=_long_schema(number)) for number in range(num_schemas)
        ] or [None]
        self._sampling = SamplingParams(temperature=temperature, top_p=top_p, ignore_eos=not num_schemas)

    def generate(self, requests: Sequence[Request]) -> list[int]:
        params = [
            replace(self._sampling, max_tokens=request.num_output, structured_outputs=form)
            for request, form in zip(requests, cycle(self._forms), strict=False)
        ]
        outputs = self._llm.generate([request.prompt for request in requests], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def facts(self) -> runner.Figures:
        time.sleep(self._idle_s)
        return super().facts()

    def counts(self) -> dict[str, float]:
        stats, executor = self._llm.stats(), self._llm.metrics().executor
        return {
            "prefill_tokens": stats.pool.num_queried_tokens - stats.pool.num_hit_tokens,
            "preemptions": stats.num_preemptions,
            "swapped_in_blocks": stats.pool.num_swapped_in,
            "steps": executor.num_steps,
            "device_s": executor.device_s,
            "plan_bytes": executor.plan_bytes,
        }


class ThroughRedis(runner.Engine):
    runs_here = False

    def __init__(
        self,
        path: Path,
        workload: Workload,
        url: str,
        idle_s: float = IDLE_S,
        temperature: float = 0.0,
        device: str = "cpu",
    ) -> None:
        self._temperature = temperature
        options = ("--max-model-len", str(workload.max_model_len), "--device", device)
        self._service = Service(url, path, f"bench-{workload.name}", options=options)
        self._first_token_s = self._service.seconds_to_first_token()
        self._idle_share = self._service.idle_cpu_share(idle_s)

    def generate(self, requests: Sequence[Request]) -> list[int]:
        self._service.run([fixed_length(each.prompt, each.num_output, self._temperature) for each in requests])
        return [request.num_output for request in requests]

    def facts(self) -> runner.Figures:
        return {
            "start_to_first_token_s": round(self._first_token_s, 2),
            "idle_cpu_share_of_a_core": round(self._idle_share, 5),
        }


def _long_schema(number: int) -> dict[str, Any]:
    """Return a schema of medium size. Its shortest text has more tokens than any request."""
    properties: dict[str, Any] = {
        f"id{number}": {"type": "integer", "minimum": 0, "maximum": 10**6},
        "kind": {"enum": ["question", "answer", "remark", None]},
        "title": {"type": "string", "maxLength": 40},
        "score": {"type": "number"},
        "is_final": {"type": "boolean"},
        "date": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}, "maxItems": 5},
        "next": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"x": {"type": "number"}}}]},
    }
    item = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "array", "items": item, "minItems": 200}


def _load(path: Path, workload: Workload, **options: Any) -> runner.Engine:
    return (ThroughRedis if "url" in options else Offline)(path, workload, **options)


if __name__ == "__main__":
    runner.run(_load)
