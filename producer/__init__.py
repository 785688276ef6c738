"""Requests, and the clients that submit them and read the results."""

from __future__ import annotations

from millrace.producer.async_client import AsyncClient
from millrace.producer.calls import Retried
from millrace.producer.client import Client
from millrace.producer.errors import InvalidRequest, PayloadTooLarge
from millrace.producer.options import SubmitOptions
from millrace.producer.request import GenerationRequest
from millrace.producer.sampling import SamplingParams
from millrace.producer.structured import StructuredOutputs, StructuredOutputsParams
from millrace.producer.submitting import Submitted

__all__ = [
    "AsyncClient",
    "Client",
    "GenerationRequest",
    "InvalidRequest",
    "PayloadTooLarge",
    "Retried",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "SubmitOptions",
    "Submitted",
]
