"""What clients, the queue and the engine exchange: requests, their wire format, and errors."""

from __future__ import annotations

from millrace.producer.errors import InvalidRequest, PayloadTooLarge
from millrace.producer.request import GenerationRequest
from millrace.producer.sampling import SamplingParams
from millrace.producer.wire import (
    MAX_BODY_BYTES,
    canonical_body,
    estimate_cost,
    parse_body,
    refusal,
    to_submission,
    usable_id,
)

__all__ = [
    "MAX_BODY_BYTES",
    "GenerationRequest",
    "InvalidRequest",
    "PayloadTooLarge",
    "SamplingParams",
    "canonical_body",
    "estimate_cost",
    "parse_body",
    "refusal",
    "to_submission",
    "usable_id",
]
