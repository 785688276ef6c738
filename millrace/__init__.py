"""Millrace turns a Redis that you already run into an LLM generation service.

    from millrace import Client

    client = Client("redis://localhost:6379/0")
    job_id = client.submit(prompt="3 + 4 =", max_tokens=4)
    print(client.wait(job_id, timeout_s=60).text)

Public names are loaded on first use, so `import millrace` is fast and needs neither torch nor rq.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.engine_service.errors import Asleep, ConfigurationError, EngineError
    from millrace.engine_service.offline import LLM
    from millrace.engine_service.prompts import TextPrompt, TokensPrompt
    from millrace.engine_service.request_output import GenerationFailed, RequestOutput
    from millrace.engine_service.vllm_arguments import EngineArgs
    from millrace.producer import (
        AsyncClient,
        Client,
        GenerationRequest,
        InvalidRequest,
        PayloadTooLarge,
        Retried,
        SamplingParams,
        StructuredOutputs,
        StructuredOutputsParams,
        SubmitOptions,
        Submitted,
    )
    from millrace.results.counts import BatchStatus, Position, QueueStats, RejectedEntry, TenantStats
    from millrace.results.errors import (
        BatchNotFound,
        CannotRedrive,
        EngineNotFound,
        JobConflict,
        JobFailed,
        JobNotFound,
        MillraceError,
        NotDurable,
        OutputNotParsed,
        QueueError,
        QueueFull,
        RedisUnavailable,
        ResultExpired,
        ServerUnsuitable,
        WaitTimeout,
    )
    from millrace.results.job import CompletionOutput, Job, StreamEvent, Timings
    from millrace.results.logprobs import Logprob
    from millrace.results.messages import JobError, ToolCall, Usage

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Asleep",
    "AsyncClient",
    "BatchNotFound",
    "BatchStatus",
    "CannotRedrive",
    "Client",
    "CompletionOutput",
    "ConfigurationError",
    "EngineArgs",
    "EngineError",
    "EngineNotFound",
    "GenerationFailed",
    "GenerationRequest",
    "InvalidRequest",
    "Job",
    "JobConflict",
    "JobError",
    "JobFailed",
    "JobNotFound",
    "Logprob",
    "MillraceError",
    "NotDurable",
    "OutputNotParsed",
    "PayloadTooLarge",
    "Position",
    "QueueError",
    "QueueFull",
    "QueueStats",
    "RedisUnavailable",
    "RejectedEntry",
    "RequestOutput",
    "ResultExpired",
    "Retried",
    "SamplingParams",
    "ServerUnsuitable",
    "StreamEvent",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "SubmitOptions",
    "Submitted",
    "TenantStats",
    "TextPrompt",
    "Timings",
    "TokensPrompt",
    "ToolCall",
    "Usage",
    "WaitTimeout",
    "__version__",
]

_MODULES = (
    "millrace.results.errors",
    "millrace.results.messages",
    "millrace.results.logprobs",
    "millrace.results.job",
    "millrace.results.counts",
    "millrace.producer",
    "millrace.engine_service.errors",
    "millrace.engine_service.prompts",
    "millrace.engine_service.offline",
    "millrace.engine_service.vllm_arguments",
)
"""Where the public names are, the fastest import first."""
_IMPORTED_LATER = ("torch", "transformers")
"""What `LLM` imports only when one is made."""


if not TYPE_CHECKING:  # for a type checker, the module has only the names imported above

    def __getattr__(name: str) -> Any:
        if name == "GuidedDecodingParams":  # `from millrace import` shows no AttributeError
            raise ImportError("millrace has no GuidedDecodingParams; use StructuredOutputs, in structured_outputs")
        if name not in __all__:
            raise AttributeError(f"module 'millrace' has no attribute {name!r}")
        try:
            module = next(found for found in map(import_module, _MODULES) if hasattr(found, name))
        except ModuleNotFoundError as error:
            if (error.name or "millrace").partition(".")[0] == "millrace":
                raise
            raise _not_installed(name, error.name) from error
        missing = [package for package in _IMPORTED_LATER if name == "LLM" and find_spec(package) is None]
        if missing:
            raise _not_installed(name, missing[0])
        value = globals()[name] = getattr(module, name)
        return value


def _not_installed(name: str, package: str | None) -> ImportError:
    return ImportError(f"millrace.{name} needs {package}; run in the checkout: pip install '.[engine]'")


def __dir__() -> list[str]:
    return sorted(__all__)
