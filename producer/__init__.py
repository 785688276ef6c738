"""What a client says to the queue: requests, and the clients that submit them and read what became of them."""

from __future__ import annotations

from producer.async_client import AsyncClient
from producer.client import Client
from producer.errors import InvalidRequest, PayloadTooLarge
from producer.request import GenerationRequest
from producer.sampling import SamplingParams

__all__ = ["AsyncClient", "Client", "GenerationRequest", "InvalidRequest", "PayloadTooLarge", "SamplingParams"]
