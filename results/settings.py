"""The settings of a queue, which docs/protocol.md describes: their ranges and defaults."""

from __future__ import annotations

import re
from typing import NamedTuple

from millrace.results.keys import NAME_PATTERN

WEIGHT = "weight:"
_MOST = 2**53 - 1
_TENANT = re.compile(NAME_PATTERN)


class Setting(NamedTuple):
    """A whole number, except for a weight."""

    low: float
    high: float
    default: str


_LIMIT = Setting(0, _MOST, "none")
SETTINGS = {
    "result_ttl_ms": Setting(1, _MOST, "86400000"),
    "record_ttl_ms": Setting(1, _MOST, "result_ttl_ms"),
    "max_queued_jobs": _LIMIT,
    "max_queued_tokens": _LIMIT,
    "tenant_max_queued_jobs": _LIMIT,
    "tenant_max_queued_tokens": _LIMIT,
    "retry_base_ms": Setting(0, _MOST, "1000"),
    "retry_max_ms": Setting(0, _MOST, "60000"),
    "max_events": Setting(2, _MOST, "8192"),
    "mismatch_wait_ms": Setting(0, _MOST, "600000"),
}
TENANT_SETTINGS = {
    WEIGHT: Setting(1e-6, 1e6, "1"),
    "tenant_max_queued_jobs:": Setting(0, _MOST, "tenant_max_queued_jobs"),
    "tenant_max_queued_tokens:": Setting(0, _MOST, "tenant_max_queued_tokens"),
}
"""Those of one tenant: its name follows."""


def setting(name: str) -> Setting | None:
    """Return the setting with this name. None: there is none."""
    kind, separator, tenant = name.partition(":")
    return TENANT_SETTINGS.get(kind + separator) if _TENANT.fullmatch(tenant) else SETTINGS.get(name)
