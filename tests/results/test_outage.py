"""What the log says of an outage."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from millrace.results.errors import RedisUnavailable
from millrace.results.outage import Outage


def call(name: str, target: Callable[..., None], *arguments: object) -> None:
    thread = threading.Thread(target=target, args=arguments, name=name)
    thread.start()
    thread.join()


def test_an_outage_has_one_line_at_its_begin_and_one_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outage = Outage()
    for _ in range(2):
        call("claim", outage.note_success)
        for thread in ("claim", "writer", "claim"):
            call(thread, outage.note_failure, RedisUnavailable("refused"))
        call("claim", outage.note_success)
        assert caplog.messages[-1] == "outage, seen by claim: refused; trying again", "the writer still fails"
        call("writer", outage.note_success)
        assert caplog.messages[-1].startswith("the outage is over after ")
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"] * 2
    assert outage.num_ended == 2


def test_an_outage_that_goes_on_for_another_reason_has_one_more_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = [0.0]
    outage = Outage(lambda: clock[0])
    for clock[0], reason in ((0.0, "closed"), (1.0, "read-only"), (6.0, "read-only"), (20.0, "read-only")):
        outage.note_failure(RedisUnavailable(reason))
    outage.note_success()
    assert [message.split(";")[0].rpartition(": ")[2] for message in caplog.messages[:-1]] == ["closed", "read-only"]
    assert caplog.messages[-1] == "the outage is over after 20.0 s"


def test_an_outage_that_lasts_has_a_line_each_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    outage = Outage(lambda: clock[0])
    for clock[0] in map(float, range(0, 200, 7)):
        outage.note_failure(RedisUnavailable("refused"))
    name = threading.current_thread().name
    assert caplog.messages == [
        f"outage{since}, seen by {name}: refused; trying again"
        for since in ("", " for 63 s", " for 126 s", " for 189 s")
    ]


def test_the_thread_that_fails_for_longest_is_named_until_it_succeeds_or_ends() -> None:
    clock = [0.0]
    outage = Outage(lambda: clock[0])
    stopping = threading.Event()
    for clock[0], thread, reason in ((0.0, "claim", "refused"), (1.0, "writer", "denied"), (5.0, "writer", "denied")):
        call(thread, outage.note_failure, RedisUnavailable(reason))
    assert outage.longest() == (5.0, "refused (the thread 'claim' has not been able to use Redis for 5.0 s)")
    assert outage.is_seen_by("writer")
    stopping.set()
    call("claim", outage.repeat, lambda: None, stopping)
    assert outage.longest() == (4.0, "denied (the thread 'writer' has not been able to use Redis for 4.0 s)")
    call("writer", outage.note_success)
    assert (outage.longest(), outage.is_seen_by("writer")) == ((0.0, ""), False)


def test_reasons_that_alternate_have_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    outage = Outage(lambda: clock[0])
    for clock[0] in map(float, range(0, 60, 6)):
        for reason in ("read-only", "denied"):
            outage.note_failure(RedisUnavailable(reason))
    assert len(caplog.messages) == 2
