"""What crosses the border between clients, the queue and the engine: requests, their form on the wire, their errors."""

from __future__ import annotations

from producer.errors import InvalidRequest, PayloadTooLarge
from producer.request import ID_PATTERN, TENANT_PATTERN, GenerationRequest
from producer.sampling import SamplingParams
from producer.wire import (
    MAX_BODY_BYTES,
    canonical_body,
    estimate_cost,
    parse_body,
    to_submission,
    usable_id,
)

__all__ = [
    "ID_PATTERN",
    "MAX_BODY_BYTES",
    "TENANT_PATTERN",
    "GenerationRequest",
    "InvalidRequest",
    "PayloadTooLarge",
    "SamplingParams",
    "canonical_body",
    "estimate_cost",
    "parse_body",
    "to_submission",
    "usable_id",
]
