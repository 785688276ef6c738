"""What tells engines apart that may not continue each other's jobs."""

from __future__ import annotations

import msgspec
import pytest

from millrace.engine_service.process import full_fingerprint
from millrace.executor.wire.kv_layout import KVLayout
from millrace.executor.wire.messages import ModelFacts

FACTS = ModelFacts(
    architecture="Phi3ForCausalLM",
    vocab_size=512,
    max_model_len=128,
    dtype="float32",
    device="cpu",
    attention="cpu",
    num_parameters=1,
    weight_bytes=4,
    kv_bytes_per_block=64,
    kv_layout=KVLayout(16, (None,), 2048, 128),
    kv_cache_dtype="bfloat16",
)


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
    assert full_fingerprint("files", msgspec.structs.replace(FACTS, rope=rope), quantization) == expected
