"""The errors of the clients: what a copy of one keeps."""

from __future__ import annotations

import copy
import pickle

import pytest

from millrace.engine_service.errors import EngineDead
from millrace.producer.errors import InvalidRequest, PayloadTooLarge
from millrace.results import errors
from millrace.results.errors import MillraceError, one_line

ERRORS = [
    errors.JobNotFound("a", "q"),
    errors.JobFailed("a", "failed", "crashed", "three engines have died"),
    errors.OutputNotParsed("length"),
    errors.ResultExpired("a", "q"),
    errors.JobConflict(["a", "b"]),
    errors.BatchNotFound("b", "q"),
    errors.EngineNotFound(None, "q"),
    errors.QueueFull("max_queued_jobs", "5", ["a"], ["b"]),
    errors.NotDurable("no replica", ["a"]),
    errors.RedisUnavailable("gone", is_outage=True),
    errors.WaitTimeout("too late"),
    InvalidRequest("field", "is wrong"),
    PayloadTooLarge(5, 4),
    EngineDead("gone", "device_lost"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_copy_of_an_error_is_the_same(error: MillraceError) -> None:
    """As a pool of processes makes one: an error that cannot be unpickled hangs its program."""
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(copied) is type(error) and str(copied) == str(error)
        assert copied.__dict__ == error.__dict__ and copied.args == error.args


def test_a_line_keeps_the_joiners_of_words_and_emoji_and_escapes_other_controls() -> None:
    text = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645, \U0001f469\u200d\U0001f4bb"
    assert one_line(text) == text
    assert one_line(f"{text}\n\u202e\u200b") == f"{text}\\n\\u202e\\u200b"
