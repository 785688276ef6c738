"""The jobs of the demo, and the expected answers where there are any."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import NamedTuple

_NUM_SUMS = 40
_LONG_PROMPTS = (
    ("story-fox", "A story about a fox:", 0.8),
    ("count", "Count from 1 to 40:", 0.0),
    ("story-bear", "A story about a bear:", 0.8),
)
_SHORT_PROMPTS = (
    ("sky", "Question: What colour is the sky? Answer:"),
    ("spider", "Question: How many legs does a spider have? Answer:"),
    ("weekday", "The day after Friday is"),
    ("opposite", "The opposite of early is"),
    ("who", "Question: Who are you? Answer:"),
)


class DemoJob(NamedTuple):
    """One job of the demo: a line of the file that the producer process submits."""

    wire: dict[str, object]
    expected: str | None = None
    """The right answer, if there is one."""

    @property
    def job_id(self) -> str:
        return str(self.wire["id"])

    @property
    def prompt(self) -> str:
        return str(self.wire["prompt"])

    @property
    def is_streamed(self) -> bool:
        return bool(self.wire.get("stream"))


def demo_jobs() -> list[DemoJob]:
    """Return streamed jobs with long answers, then short ones, then sums of two numbers."""
    long = [
        DemoJob(
            {"id": name, "prompt": prompt, "max_tokens": 160, "temperature": temperature, "seed": seed, "stream": True}
        )
        for seed, (name, prompt, temperature) in enumerate(_LONG_PROMPTS)
    ]
    short = [
        DemoJob({"id": name, "prompt": prompt, "max_tokens": 32, "temperature": 0.0}) for name, prompt in _SHORT_PROMPTS
    ]
    return [*long, *short, *_sums(random.Random(0))]


def _sums(rng: random.Random) -> list[DemoJob]:
    pairs = [(rng.randint(0, 99), rng.randint(0, 99)) for _ in range(_NUM_SUMS)]
    return [
        DemoJob(
            {"id": f"sum-{number:02}", "prompt": f"{a} + {b} =", "max_tokens": 8, "temperature": 0.0},
            expected=str(a + b),
        )
        for number, (a, b) in enumerate(pairs, start=1)
    ]


def write_jsonl(path: Path, jobs: list[DemoJob]) -> None:
    path.write_text("".join(json.dumps(job.wire) + "\n" for job in jobs))
