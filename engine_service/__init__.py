"""The engine: intake, scheduling, text and results. `LLM` is its offline face."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_service.offline import LLM as LLM
    from producer.messages import SamplingParams as SamplingParams

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Late, so that the service does not load what it does not use."""
    if name == "LLM":
        from engine_service.offline import LLM

        return LLM
    if name == "SamplingParams":
        from producer.messages import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
