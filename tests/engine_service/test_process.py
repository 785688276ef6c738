"""What tells engines apart that may not continue each other's jobs."""

from __future__ import annotations

import msgspec
import pytest

from millrace.engine_service.process import full_fingerprint
from tests.engine_service.serving.test_admission import FACTS


@pytest.mark.parametrize(
    ("quantization", "rope", "expected"),
    [
        (None, "", "files-float32-bfloat16"),
        (None, "long", "files-float32-bfloat16-long"),
        (None, "short", "files-float32-bfloat16-short"),
        ("int8", "", "files-float32-bfloat16-int8"),
        ("int8", "long", "files-float32-bfloat16-int8-long"),
    ],
)
def test_the_fingerprint_has_what_changes_the_tokens_of_a_model(
    quantization: str | None, rope: str, expected: str
) -> None:
    facts = msgspec.structs.replace(FACTS, kv_cache_dtype="bfloat16", rope=rope)
    assert full_fingerprint("files", facts, quantization) == expected
