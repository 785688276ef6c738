from __future__ import annotations

import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from millrace.producer import GenerationRequest, SamplingParams
from millrace.producer.rq.payload import MAX_PAYLOAD_BYTES, PayloadRefused, read_submission
from millrace.producer.wire import to_submission


def _payload(*args: Any, function: Any = "millrace.generate", instance: Any = None, **kwargs: Any) -> bytes:
    """As RQ's JSON serializer writes it."""
    return zlib.compress(json.dumps((function, instance, args, kwargs)).encode())


def _body(payload: bytes) -> Any:
    return json.loads(read_submission("job-1", payload).body)


def _refusal(payload: bytes, job_id: str = "job-1") -> str:
    with pytest.raises(PayloadRefused) as raised:
        read_submission(job_id, payload)
    return str(raised.value)


class _Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def test_keywords_are_the_fields_of_the_wire() -> None:
    submission = read_submission("job-1", _payload(prompt="3 + 4 =", max_tokens=4, temperature=0.0, seed=5, tenant="a"))
    sampling = SamplingParams(max_tokens=4, temperature=0.0, seed=5)
    assert submission == to_submission(GenerationRequest(id="job-1", prompt="3 + 4 =", sampling=sampling, tenant="a"))


def test_one_positional_argument_is_the_prompt() -> None:
    assert _body(_payload("3 + 4 =")) == {"prompt": "3 + 4 ="}


def test_a_chat_is_taken() -> None:
    messages = [{"role": "user", "content": "3 + 4?"}]
    assert _body(_payload(messages=messages)) == {"messages": messages}


def test_a_payload_with_too_many_lists_is_not_opened() -> None:
    assert _refusal(b"[" * 30_001).startswith("the payload has more than 30,000 strings, lists and objects")


def test_any_text_survives() -> None:
    assert _body(_payload("Grüße, 世界 🙂 \x00 \u2028"))["prompt"] == "Grüße, 世界 🙂 \x00 \u2028"


def test_a_payload_that_is_not_compressed_is_taken_as_rq_takes_it() -> None:
    assert _body(zlib.decompress(_payload("hello"))) == {"prompt": "hello"}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("is_compressed", [True, False])
def test_a_pickled_payload_is_refused_unopened(tmp_path: Path, protocol: int, is_compressed: bool) -> None:
    trap = tmp_path / "opened"
    plain = pickle.dumps(("millrace.generate", None, (_Trap(trap),), {}), protocol)
    message = _refusal(zlib.compress(plain) if is_compressed else plain)
    assert 'serializer="json"' in message
    assert not trap.exists()


@pytest.mark.parametrize("num_bytes", [MAX_PAYLOAD_BYTES + 1, 1 << 28])
def test_a_decompression_bomb_is_not_inflated(num_bytes: int) -> None:
    deflater = zlib.compressobj()
    bomb = b"".join(deflater.compress(b" " * (1 << 20)) for _ in range(num_bytes >> 20)) + deflater.compress(b"    ")
    assert "larger than" in _refusal(bomb + deflater.flush())


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (_payload("ls", function="os.system"), "runs \"millrace.generate\" and nothing else, not 'os.system'"),
        (_payload("ls", function=["os.system"]), "nothing else"),
        (_payload("ls", function=None), "nothing else, not None"),
        (_payload("x", instance={"a": 1}), "nothing else"),
        (_payload("a", "b"), "one positional argument"),
        (_payload(7), "one positional argument"),
        (_payload("a", prompt="b"), "prompt: is given twice"),
        (_payload("a", id="x"), "id: "),
        (_payload(), "prompt: give exactly one of"),
        (_payload(""), "prompt: must be a string that is not empty"),
        (_payload("a", max_tokens=0), "max_tokens: must be an integer from 1"),
        (_payload("a", max_tokens="4"), "max_tokens: "),
        (_payload("a", temperature=float("nan")), "temperature: "),
        (_payload("a", temperature=float("-inf")), "temperature: "),
        (_payload("a", max_token=4), "max_token: is not a field"),
        (_payload("a", delay_s=-1), "delay_s: must be a number from 0"),
        (_payload("a", delay_s=float("inf")), "delay_s: must be a finite number"),
        (_payload("a", delay_s=10**400), "delay_s: "),
        (_payload("a", deadline_s=0), "deadline_s: must be a number above 0"),
        (_payload("a", deadline_s=-5), "deadline_s: must be a number above 0"),
        (_payload("a", deadline_s=float("nan")), "deadline_s: must be a finite number"),
        (_payload("a", priority=1.5), "priority: "),
        (_payload("a", priority="high"), "priority: "),
        (_payload("a", priority=2**31), "priority: must be an integer from"),
        (_payload("a", tenant="a b"), "tenant: must match"),
        (_payload("a", tenant="a:jobs"), "tenant: must match"),
        (_payload("a", tenant=""), "tenant: must match"),
        (_payload("a", batch="nightly"), "batch: is not a field"),
        (_payload("half \ud800"), "surrogate"),
        (_payload("x" * (1 << 20)), "body: "),
        (zlib.compress(b"null"), "but not ["),
        (zlib.compress(b"[1, 2]"), "but not ["),
        (zlib.compress(b'["millrace.generate", null, {}, {}]'), "args must be a list"),
        (zlib.compress(b'["millrace.generate", null, [], []]'), "kwargs an object"),
        (zlib.compress(b'["millrace.generate", null, ["\xff"], {}]'), "not JSON that can be read"),
        (zlib.compress(b"[" * 10_000), "not JSON that can be read"),
        (zlib.compress(b'["millrace.generate", null, [], {"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}]"), "JSON"),
        (zlib.compress(b'["millrace.generate", null, [' + b"9" * 5000 + b"], {}]"), "not JSON that can be read"),
        (_payload("cut")[:-10], "not JSON that can be read"),
        (b"", "no payload"),
    ],
)
def test_what_cannot_be_a_request_is_refused_with_a_reason(payload: bytes, message: str) -> None:
    assert message in _refusal(payload)


def test_an_id_that_is_too_long_for_millrace_is_refused() -> None:
    assert _refusal(_payload("hello"), "x" * 129).startswith("invalid_request: id: ")
    assert read_submission("x" * 128, _payload("hello")).job_id == "x" * 128
