"""The jobs of the fault tests, and the output of each without faults."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from millrace import LLM, CompletionOutput, GenerationRequest, SamplingParams
from tests.e2e.engines import TINY


def make_jobs(
    num_jobs: int, max_tokens: int = 200, *, first: int = 0, prompt_repeats: int = 1, prefix: str = "", n: int = 1
) -> list[GenerationRequest]:
    """Return sampled jobs with ids and seeds; every second one is streamed. They end by length alone. All prompts begin with
    `prefix`; each job has `n` candidates."""
    return [
        GenerationRequest(
            id=f"job-{number}",
            prompt=prefix + f"Count from {number} to 99: " * prompt_repeats,
            sampling=SamplingParams(temperature=0.8, seed=number, max_tokens=max_tokens, ignore_eos=True, n=n),
            stream=number % 2 == 0,
        )
        for number in range(first, first + num_jobs)
    ]


class Undisturbed:
    """Owns a model in this process and the outputs of a run without faults."""

    def __init__(self) -> None:
        self._llm = LLM(TINY, device="cpu", dtype="float32")
        self._outputs: dict[bytes, list[CompletionOutput]] = {}

    def close(self) -> None:
        self._llm.shutdown()

    def outputs(self, requests: Iterable[GenerationRequest]) -> dict[str, list[CompletionOutput]]:
        """Return the candidates of each job by its id."""
        by_id = {request.id or "": request for request in requests}
        new = [request for request in by_id.values() if _key(request) not in self._outputs]
        prompts = [request.prompt or list(request.prompt_token_ids or []) for request in new]
        params = [request.sampling for request in new]
        for request, found in zip(new, self._llm.generate(prompts, params, use_tqdm=False), strict=True):
            # A job has the parts of its text too. Without tools and reasoning all of it is content.
            self._outputs[_key(request)] = [msgspec.structs.replace(one, content=one.text) for one in found.outputs]
        return {job_id: self._outputs[_key(request)] for job_id, request in by_id.items()}


def _key(request: GenerationRequest) -> bytes:
    return msgspec.json.encode((request.prompt, request.prompt_token_ids, request.sampling))
