from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import product
from string import ascii_letters
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.producer import GenerationRequest, InvalidRequest, PayloadTooLarge, SamplingParams
from millrace.producer.checks import MAX_COMMAS, MAX_NAMES, MAX_PARTS
from millrace.producer.openai_format import to_request
from millrace.producer.options import SubmitOptions, build_request
from millrace.producer.wire import MAX_BODY_BYTES, canonical_body, estimate_cost, parse_body, to_submission, usable_id

DEEP = b"[" * 10_000 + b"]" * 10_000


def test_a_request_is_one_flat_object_without_defaults_and_id() -> None:
    request = GenerationRequest(id="a", prompt="x", sampling=SamplingParams(temperature=0.5, max_tokens=None))
    assert canonical_body(request) == b'{"max_tokens":null,"prompt":"x","temperature":0.5}'


def test_every_field_comes_back() -> None:
    sampling = SamplingParams(max_tokens=5, temperature=0, top_p=0.5, stop=["a", "b"], stop_token_ids=[1], seed=-5)
    chat = [{"role": "user", "content": [{"type": "text", "text": "hé"}]}]
    for prompt in ({"prompt": "x\0é\U0001f600"}, {"prompt_token_ids": [0, 2**31 - 1]}, {"messages": chat}):
        request = GenerationRequest(
            model="m",
            sampling=sampling,
            tenant="t-1",
            priority=-5,
            stream=True,
            deadline_s=60,
            delay_s=1.5,
            max_retries=0,
            meta={"customer": [1, {"é": None}]},
            **prompt,
        )
        assert parse_body(canonical_body(request)) == request


sampling_fields = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.none() | st.integers(1, 2**31 - 1),
        "temperature": st.just(0.0) | st.floats(0.01, 2),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.integers(-1, 1000),
        "seed": st.integers(0, 2**63 - 1),
        "stop": st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1),
        "ignore_eos": st.booleans(),
        "logprobs": st.none() | st.integers(-1, 20),
        "prompt_logprobs": st.none() | st.integers(-1, 20),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(1e-9, 1e9),
        "logit_bias": st.dictionaries(st.integers(0, 2**31 - 1).map(str), st.floats(-100, 100), max_size=5),
        "allowed_token_ids": st.none() | st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
        "bad_words": st.lists(
            st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip), max_size=3
        ),
        "thinking_token_budget": st.none() | st.integers(-1, 1000),
        "truncate_prompt_tokens": st.none() | st.just(-1) | st.integers(1, 1000),
        "include_stop_str_in_output": st.booleans(),
    },
)


@given(prompt=st.text(st.characters(exclude_categories=["Cs"]), min_size=1), fields=sampling_fields)
def test_any_request_survives_the_wire_and_keeps_its_digest(prompt: str, fields: dict[str, Any]) -> None:
    request = GenerationRequest(prompt=prompt, sampling=SamplingParams(**fields))
    body = canonical_body(request)
    again = parse_body(body)
    assert again == request
    assert canonical_body(again) == body
    spaced = json.dumps({**fields, "prompt": prompt, "id": "x"}, indent=2).encode()
    assert to_submission(parse_body(spaced)).digest == to_submission(request).digest


def test_the_digest_does_not_depend_on_id_order_spaces_or_defaults() -> None:
    bodies = [
        b'{"prompt":"x","temperature":1,"max_tokens":5}',
        b'{ "max_tokens": 5, "id": "b", "prompt": "\\u0078", "top_p": 1.0, "tenant": "default" }',
    ]
    assert len({to_submission(parse_body(body)).digest for body in bodies}) == 1
    other = to_submission(parse_body(b'{"prompt":"x","max_tokens":6}'))
    assert other.digest != to_submission(parse_body(bodies[0])).digest


def test_a_submission_has_what_the_queue_needs() -> None:
    sampling = SamplingParams(seed=5, max_tokens=20)
    request = GenerationRequest(id="a", prompt="x" * 9, sampling=sampling, tenant="t", priority=3, stream=True)
    job = to_submission(request)
    assert (job.job_id, job.seed, job.tenant, job.priority, job.is_streamed) == ("a", 5, "t", 3, True)
    assert job.cost == 3 + 20


def test_times_and_what_else_the_queue_keeps_apart_are_in_the_submission() -> None:
    request = GenerationRequest(prompt="x", delay_s=1.5, deadline_s=60, max_retries=5, meta={"b": 1, "a": "x"})
    job = to_submission(request, batch="nightly")
    assert (job.delay_ms, job.run_at_ms, job.deadline_ms, job.max_retries) == (1500, None, 60_000, 5)
    assert (job.meta, job.batch) == (b'{"a":"x","b":1}', "nightly")
    assert to_submission(GenerationRequest(prompt="x", run_at=1.0)).run_at_ms == 1000
    assert to_submission(GenerationRequest(prompt="x", max_retries=2)).max_retries is None


def test_the_queue_knows_how_many_candidates_a_request_has() -> None:
    job = to_submission(parse_body(b'{"prompt":"x","n":3}'))
    assert (job.n, job.body) == (3, b'{"n":3,"prompt":"x"}')
    alone = to_submission(parse_body(b'{"prompt":"x","n":1}'))
    assert (alone.n, alone.body) == (1, b'{"prompt":"x"}')


@pytest.mark.parametrize("fields", [b'"n":2,"temperature":0', b'"n":65', b'"n":0', b'"n":[2]'])
def test_candidates_that_cannot_be_are_refused_by_the_name_of_n(fields: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^n: "):
        parse_body(b'{"prompt":"x",' + fields + b"}")


def test_ids_and_seeds_are_drawn_where_there_are_none() -> None:
    request = GenerationRequest(prompt="x")
    jobs = [to_submission(request) for _ in range(100)]
    assert len({job.job_id for job in jobs}) == len({job.seed for job in jobs}) == 100
    assert all(0 <= job.seed < 2**63 for job in jobs)
    assert len({job.digest for job in jobs}) == 1


@pytest.mark.parametrize(
    ("request_", "cost"),
    [
        (GenerationRequest(prompt="é" * 6), 3 + 16),
        (GenerationRequest(prompt_token_ids=[1] * 7), 7 + 16),
        (GenerationRequest(prompt="x", sampling=SamplingParams(max_tokens=None)), 1 + 1024),
        (GenerationRequest(prompt="é" * 6, sampling=SamplingParams(max_tokens=5, n=3)), 3 + 3 * 5),
    ],
)
def test_a_cost_is_estimated_from_bytes_or_ids_and_what_may_be_generated(
    request_: GenerationRequest, cost: int
) -> None:
    assert estimate_cost(request_) == cost


def nested(depth: int) -> bytes:
    """Objects and lists in turns, with what looks like more of them in a string."""
    inner = b'"[{\\"[{"'
    for level in range(depth):
        inner = b'{"a":' + inner + b"}" if (depth - level) % 2 else b"[" + inner + b',[],"]"]'
    return inner


def message(content: bytes) -> bytes:
    return b'{"role":"user","content":' + content + b"}"


MALFORMED: list[tuple[bytes, str]] = [
    (b"", "body"),
    (b"not json", "body"),
    (b'{"prompt":"x"', "body"),
    (b'{"prompt":"x"} {}', "body"),
    (b"[]", "body"),
    (b"null", "body"),
    (b'"x"', "body"),
    (b"\xff\xfe{}", "body"),
    (b'{"prompt":"\xff"}', "body"),
    (b'{"prompt":"\\ud800"}', "body"),
    (DEEP, "body"),
    (b'{"messages":[{"role":"user","content":' + DEEP + b"}]}", "body"),
    *(
        (b'{"prompt":"x","meta":' + nested(depth) + b"}", "body")
        for depth in (64, 100, 500, *range(900, 1010, 3), 5000)
    ),
    *((b'{"messages":[' + message(nested(depth)) + b"]}", "body") for depth in (62, 100, *range(900, 1010, 3), 5000)),
    (b'{"messages":[' + message(b"9" * 5000) + b"]}", "messages"),
    (b'{"prompt":"x","x":' + DEEP + b"}", "x"),
    (b"{}", "prompt"),
    (b'{"prompt":"x","prompt_token_ids":[1]}', "prompt"),
    (b'{"prompt":"x","messages":[{"role":"user","content":"x"}]}', "prompt"),
    (b'{"prompt":""}', "prompt"),
    (b'{"prompt":5}', "prompt"),
    (b'{"prompt":"x","prompt":"y"}', "prompt"),
    (b'{"prompt_token_ids":[]}', "prompt_token_ids"),
    (b'{"prompt_token_ids":[1,"2"]}', "prompt_token_ids"),
    (b'{"prompt_token_ids":[-1]}', "prompt_token_ids"),
    (b'{"prompt_token_ids":[2147483648]}', "prompt_token_ids"),
    (b'{"prompt_token_ids":[1.5]}', "prompt_token_ids"),
    (b'{"messages":[]}', "messages"),
    (b'{"messages":["x"]}', "messages"),
    (b'{"messages":[{"content":"x"}]}', "messages"),
    (b'{"messages":[{"role":"user"}]}', "messages"),
    (b'{"prompt":"x","unknown":1}', "unknown"),
    (b'{"prompt":"x","":1}', "body"),
    (b'{"prompt":"x","temperature":NaN}', "temperature"),
    (b'{"prompt":"x","temperature":-Infinity}', "temperature"),
    (b'{"prompt":"x","temperature":1e999}', "temperature"),
    (b'{"prompt":"x","temperature":"hot"}', "temperature"),
    (b'{"prompt":"x","max_tokens":0}', "max_tokens"),
    (b'{"prompt":"x","max_tokens":-5}', "max_tokens"),
    (b'{"prompt":"x","max_tokens":9223372036854775808}', "max_tokens"),
    (b'{"prompt":"x","max_tokens":' + b"9" * 400 + b"}", "max_tokens"),
    (b'{"prompt":"x","max_tokens":true}', "max_tokens"),
    (b'{"prompt":"x","temperature":1' + b"0" * 400 + b"}", "temperature"),
    (b'{"prompt":"x","delay_s":1' + b"0" * 400 + b"}", "delay_s"),
    (b'{"prompt":"x","deadline_s":1' + b"0" * 400 + b"}", "deadline_s"),
    (b'{"prompt":"x","run_at":-1' + b"0" * 400 + b"}", "run_at"),
    (b'{"prompt":"x","stop":[""]}', "stop"),
    (b'{"prompt":"x","stop":[1]}', "stop"),
    (b'{"prompt":"x","logprobs":-5}', "logprobs"),
    (b'{"prompt":"x","id":"a b"}', "id"),
    (b'{"prompt":"x","id":""}', "id"),
    (b'{"prompt":"x","id":"a:b"}', "id"),
    (b'{"prompt":"x","id":"' + b"a" * 129 + b'"}', "id"),
    (b'{"prompt":"x","id":5}', "id"),
    (b'{"prompt":"x","tenant":"a/b"}', "tenant"),
    (b'{"prompt":"x","tenant":"' + b"a" * 65 + b'"}', "tenant"),
    (b'{"prompt":"x","priority":1.5}', "priority"),
    (b'{"prompt":"x","priority":2147483648}', "priority"),
    (b'{"prompt":"x","stream":"yes"}', "stream"),
    (b'{"prompt":"x","model":""}', "model"),
    (b'{"prompt":"x","priority":"high"}', "priority"),
    (b'{"prompt":"x","tenant":""}', "tenant"),
    (b'{"prompt":"x","tenant":"a b"}', "tenant"),
    (b'{"prompt":"x","tenant":"a:jobs"}', "tenant"),
    (b'{"prompt":"x","tenant":"\xc3\xa9"}', "tenant"),
    (b'{"prompt":"x","deadline_s":0}', "deadline_s"),
    (b'{"prompt":"x","deadline_s":-5}', "deadline_s"),
    (b'{"prompt":"x","deadline_s":"soon"}', "deadline_s"),
    (b'{"prompt":"x","deadline_s":1e11}', "deadline_s"),
    (b'{"prompt":"x","deadline_s":5,"delay_s":5}', "deadline_s"),
    (b'{"prompt":"x","delay_s":-1}', "delay_s"),
    (b'{"prompt":"x","delay_s":1e308}', "delay_s"),
    (b'{"prompt":"x","delay_s":true}', "delay_s"),
    (b'{"prompt":"x","run_at":-1}', "run_at"),
    (b'{"prompt":"x","run_at":5,"delay_s":5}', "run_at"),
    (b'{"prompt":"x","max_retries":-1}', "max_retries"),
    (b'{"prompt":"x","max_retries":101}', "max_retries"),
    (b'{"prompt":"x","meta":[1]}', "meta"),
    (b'{"prompt":"x","meta":"text"}', "meta"),
    (b'{"prompt":"x","meta":{"a":"' + b"x" * 16384 + b'"}}', "meta"),
]


@pytest.mark.parametrize(("raw", "field"), MALFORMED, ids=lambda value: repr(value)[:40])
def test_a_malformed_body_is_refused_with_the_field_at_fault(raw: bytes, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(raw)
    assert caught.value.field == field
    assert len(str(caught.value)) < 300


CONTROLS = "a\nb\r\t\x1b[31m\0\x85\u2028 - at `$.prompt`"
NAMES = [CONTROLS, "x" * 900_000, CONTROLS * 20_000, "`", "\\", " - at `$", "\U0001f600" * 100]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:20])
def test_whatever_name_a_field_has_its_error_is_one_short_line(name: str) -> None:
    bodies = {
        "is not a field": {"prompt": "x", name: 1},
        "must be an object": {"prompt": "x", "messages": [name]},
        "must match": {"prompt": "x", "tenant": name},
    }
    raws = {words: json.dumps(body).encode() for words, body in bodies.items()}
    raws["is given twice"] = b'{"prompt":"x","meta":{%s:1,%s:2}}' % ((json.dumps(name[:9000]).encode(),) * 2)
    for words, raw in raws.items():
        if len(raw) > MAX_BODY_BYTES:
            continue
        with pytest.raises(InvalidRequest, match=words) as caught:
            parse_body(raw)
        message = str(caught.value)
        assert len(message) < 500
        assert message.isprintable()
        assert message.startswith(f"{caught.value.field}: ")
    if len(name) < 40 and name.isprintable():
        assert name in message


PROMPTS = ("prompt", "prompt_token_ids", "messages")
FIELDS = [*GenerationRequest.__struct_fields__, *SamplingParams.__struct_fields__]


@pytest.mark.parametrize("value", ["5", 1.5, True, [], {}, {"a": 1}, ["x", 5], 2**40, "\x1b"], ids=repr)
@pytest.mark.parametrize("field", [name for name in FIELDS if name not in ("id", "sampling")])
def test_a_wrong_value_has_one_error_in_json_and_in_python(field: str, value: Any) -> None:
    body = {field: value} if field in PROMPTS else {"messages": [{"role": "user", "content": "x"}], field: value}
    options = {name: body[name] for name in body if name != "prompt"}
    makers: list[Callable[[], GenerationRequest]] = [
        lambda: parse_body(json.dumps(body).encode()),
        lambda: build_request(body.get("prompt"), cast(SubmitOptions, options)),
    ]
    if field in ("response_format", "tool_choice", "top_p", "seed", "stop", "n", "logit_bias"):
        makers.append(lambda: to_request("/v1/chat/completions", {"max_tokens": 16, **body}))
    found: set[bytes] = set()
    for make in makers:
        try:
            found.add(canonical_body(make()))
        except InvalidRequest as error:
            found.add(str(error).encode())
    assert len(found) == 1


def test_null_is_the_default_of_every_field_but_max_tokens() -> None:
    fields = dict.fromkeys(FIELDS)
    del fields["sampling"], fields["max_tokens"], fields["prompt"]
    expected = GenerationRequest(prompt="x")
    assert parse_body(json.dumps({"prompt": "x", **fields}).encode()) == expected
    del fields["id"]
    assert build_request("x", cast(SubmitOptions, {**fields, "sampling": None})) == expected
    assert parse_body(b'{"prompt":"x","max_tokens":null}').sampling.max_tokens is None


def test_empty_and_repeated_names_are_refused_too() -> None:
    for raw, message in [
        (b'{"prompt":"x","":1}', "body: has a field without a name; leave it out"),
        (b'{"prompt":"x","meta":{"":1,"":2}}', "body: the name '' is given twice; leave one of them out"),
        (b'{"prompt":"x","prompt":"y"}', "prompt: the name 'prompt' is given twice; leave one of them out"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            parse_body(raw)
        assert str(caught.value) == message


def test_a_repeated_name_among_very_many_is_found_at_once() -> None:
    """Comparing each with each would take longer than a test may."""
    names = list(map("".join, product(ascii_letters, repeat=3)))[: MAX_NAMES - 3]
    fields = ",".join(f'"{name}":0' for name in [*names, names[-1]])
    with pytest.raises(InvalidRequest, match=f"^{names[-1]}: the name '{names[-1]}' is given twice"):
        parse_body(b'{"prompt":"x","meta":{%s}}' % fields.encode())


def with_parts(number: int, inner: bytes) -> bytes:
    """Return a chat of exactly `number` strings, lists and objects, mostly copies of `inner`."""
    rest = b'{"messages":[{"role":"user","content":"\\\\","own":[%s]}]}'
    num_free = number - 10  # two objects, two lists, six strings
    inner_parts = inner.count(b'"') // 2 + inner.count(b"[") + inner.count(b"{")
    copies, strings = divmod(num_free, inner_parts)
    return rest % b",".join([inner] * copies + [b'"[{\\"\\\\"'] * strings)


@pytest.mark.parametrize("inner", [b"[]", b"{}", b'"a"', b"[[[[[]]]]]", b'{"a":["b"]}'], ids=repr)
def test_a_body_has_at_most_so_many_strings_lists_and_objects(inner: bytes) -> None:
    to_submission(request := parse_body(with_parts(MAX_PARTS, inner)))
    too_large = with_parts(MAX_PARTS + 1, inner)
    rule = r"^body: has more than 30,000 strings, lists and objects, 25,000 names or 200,000 commas between values"
    with pytest.raises(InvalidRequest, match=rule):
        parse_body(too_large)
    with pytest.raises(InvalidRequest, match=rule):
        to_submission(GenerationRequest(messages=[*(request.messages or []), {"role": "user", "content": "x"}]))
    with pytest.raises(InvalidRequest, match=rule):
        parse_body(b'{"broken' + b'"",' * 300_000)


def test_what_strings_contain_is_not_counted() -> None:
    text = '\\[{"a":["\\"]}],,,,,,,,,,' * 20_000
    made = GenerationRequest(prompt=text), GenerationRequest(messages=[{"role": "user", "content": text}])
    for request in made:
        assert parse_body(canonical_body(request)) == request


def test_a_body_has_at_most_so_many_names() -> None:
    names = ",".join(f'"{n}":{n}' for n in range(MAX_NAMES - 4))
    raw = b'{"messages":[{"role":"user","content":":","own":{%s}}]}' % names.encode()
    to_submission(parse_body(raw))
    with pytest.raises(InvalidRequest, match=r"^body: has more than .* 25,000 names or "):
        parse_body(raw.replace(b'"0":0', b'"0":0,"x":0'))


def test_a_body_has_at_most_so_many_numbers() -> None:
    ids = [1] * (MAX_COMMAS + 1)
    body = canonical_body(GenerationRequest(prompt_token_ids=ids))
    assert parse_body(body).prompt_token_ids == ids
    rule = r"^prompt_token_ids: has too many token ids; at most 200,000 are allowed, other numbers and fields included$"
    with pytest.raises(InvalidRequest, match=rule):
        parse_body(body.replace(b"[1", b"[1,1"))
    with pytest.raises(InvalidRequest, match=rule):
        parse_body(b'{"prompt_token_ids" : [' + b"1," * 300_000)
    with pytest.raises(InvalidRequest, match=rule):
        to_submission(GenerationRequest(prompt_token_ids=[*ids, 1]))
    rule = r"^body: has more than .* or 200,000 commas between values; shorten it$"
    with pytest.raises(InvalidRequest, match=rule):
        parse_body(b'{"prompt_token_ids":[1],"meta":{"own":[' + b"1," * MAX_COMMAS + b"1]}}")


@pytest.mark.parametrize(
    "meta",
    ['"a":1,"\\u0061":2', '"a:":1,"a\\u003a":2', '"a":"\\u003A","a":""', '"b":{"a":":","a":{}}', '"a":1, "a" : 1'],
)
def test_a_repeated_name_is_found_however_it_and_the_colons_are_written(meta: str) -> None:
    good = b'{"prompt":"::\\u003a","meta":{"a" : ":","b":[{"a:":"\\u003A"}]}}'
    assert parse_body(good).meta == {"a": ":", "b": [{"a:": ":"}]}
    with pytest.raises(InvalidRequest, match="is given twice"):
        parse_body(f'{{"prompt":"::\\u003a","meta":{{{meta}}}}}'.encode())
    with pytest.raises(InvalidRequest, match="is given twice"):
        parse_body(f'{{"prompt":"x","meta":{{{meta}}}}}'.encode())


def test_the_limit_of_nesting_is_the_same_for_every_caller_and_every_parser() -> None:
    own_field = b'{"role":"user","content":"x","own":' + nested(61) + b"}"
    bodies = [b'{"prompt":"x","meta":' + nested(63) + b"}", b'{"messages":[' + own_field + b"]}"]
    brackets_in_text = b'{"prompt":"' + b'[{\\"' * 1000 + b'"}'

    def parse_far_down(depth: int) -> None:
        if depth:
            parse_far_down(depth - 1)
        else:
            for body in (*bodies, brackets_in_text):
                to_submission(parse_body(body))

    parse_far_down(0)
    parse_far_down(500)
    meta = {"a": parse_body(bodies[0]).meta}
    with pytest.raises(InvalidRequest, match=r"^body: is nested too deeply; at most 64 levels"):
        to_submission(GenerationRequest(prompt="x", meta=meta))


def test_half_a_surrogate_pair_is_called_what_it_is() -> None:
    for raw in (b'{"prompt":"\\ud800"}', b'{"prompt":"\\ud83d more"}', b'{"prompt":"x","meta":{"\\uDC00":1}}'):
        with pytest.raises(InvalidRequest, match=r"^body: .*a string has half of a surrogate pair"):
            parse_body(raw)
    with pytest.raises(InvalidRequest, match=r"^body: .*truncated"):
        parse_body(b'{"prompt":"\\ud83d\\ude00"')


@given(st.binary(max_size=200))
def test_no_bytes_at_all_break_the_parser(raw: bytes) -> None:
    try:
        parse_body(raw)
    except InvalidRequest:
        usable_id(raw)


def test_a_body_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(PayloadTooLarge, match="1048576"):
        parse_body(b"x" * (MAX_BODY_BYTES + 1))
    with pytest.raises(PayloadTooLarge):
        to_submission(GenerationRequest(prompt="x" * MAX_BODY_BYTES))
    to_submission(GenerationRequest(prompt="x" * (MAX_BODY_BYTES - 100)))


@pytest.mark.parametrize(
    ("raw", "job_id"),
    [
        (b'{"id":"a1","prompt":5}', "a1"),
        (b'{"id":"a1","x":' + DEEP + b"}", "a1"),
        (b'{"id": "a1", "temperature": NaN}', "a1"),
        (b'{"id":"a1","prompt":"\xff"}', "a1"),
        (b'{"id":"a1","promp', "a1"),
        (b'{"id":"a b","prompt":5}', None),
        (b'{"id":"\xff\xfe","prompt":"x"}', None),
        (b'{"id":"' + b"a" * 129 + b'"}', None),
        (b'{"id":5}', None),
        (b'{"prompt":5}', None),
        (b'{"meta":{"id":"inner"},"prompt":5}', None),
        (b'{"prompt":"say \\"id\\": \\"quoted\\" now', None),
        (b'{"meta":{"id":"inner"},"prompt":"x', None),
        (b'{"messages":[{"id":"inner"}],"id":"a1","promp', "a1"),
        (b'{"prompt":"{ \\\\","id":"a1","promp', "a1"),
        (b'{"prompt":"x\\","id":"inside","y', None),
        (b'["id":"a1"', None),
        (b'{"prompt":"x"},{"id":"second"}', None),
        (b'{"id":{"id":"inner"', None),
        (b'{"messages":' + b"[" * 1_000_000, None),
        (b"garbage", None),
        (b"", None),
        (b"[]", None),
    ],
)
def test_the_id_is_saved_from_a_malformed_body_where_it_has_a_proper_one(raw: bytes, job_id: str | None) -> None:
    assert usable_id(raw) == job_id


def test_requests_made_in_python_are_checked_as_those_on_the_wire() -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("prompt", {}),
        ("prompt", {"prompt": "x", "prompt_token_ids": [1]}),
        ("prompt", {"prompt": b"bytes"}),
        ("prompt", {"prompt": "\ud800"}),
        ("prompt_token_ids", {"prompt_token_ids": (1, 2)}),
        ("prompt_token_ids", {"prompt_token_ids": [True]}),
        ("messages", {"messages": [{"role": "user", "content": "x", 5: 6}]}),
        ("id", {"prompt": "x", "id": "a\n"}),
        ("tenant", {"prompt": "x", "tenant": 5}),
        ("priority", {"prompt": "x", "priority": True}),
        ("sampling", {"prompt": "x", "sampling": {"max_tokens": 5}}),
        ("meta", {"prompt": "x", "meta": {"a": object()}}),
        ("meta", {"prompt": "x", "meta": {1: 2}}),
        ("meta", {"prompt": "x", "meta": {"a": [math.nan]}}),
        ("meta", {"prompt": "x", "meta": {"a": "\ud800"}}),
        ("delay_s", {"prompt": "x", "delay_s": float("nan")}),
        ("delay_s", {"prompt": "x", "delay_s": 10**400}),
        ("deadline_s", {"prompt": "x", "deadline_s": 10**400}),
        ("deadline_s", {"prompt": "x", "deadline_s": -(10**400)}),
        ("run_at", {"prompt": "x", "run_at": 10**400}),
    ]
    for field, fields in wrong:
        with pytest.raises(InvalidRequest) as caught:
            GenerationRequest(**fields)
        assert caught.value.field == field
    for content, words in (
        (object(), "cannot be written"),
        ([math.nan], "has what JSON cannot hold"),
        ([{"a": "\ud800"}], "cannot be written"),
    ):
        with pytest.raises(InvalidRequest, match=f"messages: item 0 {words}"):
            GenerationRequest(messages=[{"role": "user", "content": content}])
    with pytest.raises(InvalidRequest, match="messages: cannot be written as JSON"):
        to_submission(GenerationRequest(messages=[{"role": "user", "content": "\ud800"}]))


def test_what_means_the_same_is_the_same_job_however_it_was_made() -> None:
    made = [
        GenerationRequest(prompt="x", sampling=SamplingParams(temperature=0, top_p=1, max_tokens=16)),
        GenerationRequest(prompt="x", sampling=SamplingParams(temperature=0.0), tenant="".join(["def", "ault"])),
        parse_body(b'{"prompt":"x","temperature":0,"top_k":0,"stop_token_ids":[],"stop":[],"seed":-1}'),
        parse_body(b'{"prompt":"x","temperature":0.0,"max_tokens":16,"priority":0,"stream":false,"model":null}'),
    ]
    timed = [GenerationRequest(prompt="x", delay_s=5), parse_body(b'{"prompt":"x","delay_s":5}')]
    assert {canonical_body(request) for request in timed} == {b'{"delay_s":5.0,"prompt":"x"}'}
    assert {canonical_body(request) for request in made} == {b'{"prompt":"x","temperature":0.0}'}


def test_keys_are_sorted_but_for_those_that_a_template_shows_to_the_model() -> None:
    body = (
        b'{"chat_template_kwargs":{"a":1,"b":2},"messages":[{"role":"user","content":"x"}],'
        b'"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":'
        b'{"zebra":{"type":"integer"},"age":{"type":"integer"}}}}}]}'
    )
    fields: Any = json.loads(body) | {"chat_template_kwargs": {"b": 2, "a": 1}}
    request = build_request(None, fields)
    assert canonical_body(request) == canonical_body(parse_body(body)) == body
