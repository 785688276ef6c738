"""What type checkers know of the public names. `make type` is the test: each error that is named here has to be found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

import msgspec

import millrace
from millrace import LLM, AsyncClient, Client, CompletionOutput, GenerationRequest, Job, SamplingParams


class Answer(msgspec.Struct):
    text: str


class OwnClient(AsyncClient):
    pass


def check_names(llm: LLM) -> None:
    if TYPE_CHECKING:
        millrace.Clinet  # type: ignore[attr-defined]  # noqa: B018
        llm.encode("a")  # type: ignore[attr-defined]
        SamplingParams(max_token=4)  # type: ignore[call-arg]
        GenerationRequest(promt="a")  # type: ignore[call-arg]


def check_results(client: Client, job: Job, output: CompletionOutput) -> None:
    if TYPE_CHECKING:
        assert_type(job.parsed(Answer), Answer)
        assert_type(output.parsed(Answer), Answer)
        assert_type(job.parsed(), Any)
        assert_type(job.timings, millrace.Timings)
        assert_type(client.submit_many([]), millrace.Submitted)
        assert_type(client.retry_all(), millrace.Retried)


async def check_own_client(client: OwnClient) -> None:
    async with client as same:
        assert_type(same, OwnClient)


def test_the_names_exist() -> None:
    for name in ("Retried", "SubmitOptions", "Submitted", "Timings"):
        assert getattr(millrace, name).__name__ == name
