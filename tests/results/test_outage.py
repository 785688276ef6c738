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


def test_reasons_that_alternate_have_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    outage = Outage(lambda: clock[0])
    for clock[0] in map(float, range(0, 60, 6)):
        for reason in ("read-only", "denied"):
            outage.note_failure(RedisUnavailable(reason))
    assert len(caplog.messages) == 2
