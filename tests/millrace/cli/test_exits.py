"""Signals of a verb."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

INTERRUPTED_IN_DEL = """
import signal, sys, time
from millrace.cli.exits import sigterm_interrupts

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts programs in the background without it

class Dropped:
    def __del__(self):
        signal.raise_signal(int(sys.argv[1]))

try:
    with sigterm_interrupts():
        Dropped()
        print("the exception was dropped", flush=True)
        time.sleep(600)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_in_a_destructor_interrupts_too(number: signal.Signals) -> None:
    """Python drops the exception there, so the verb would go on for ever."""
    command = [sys.executable, "-c", INTERRUPTED_IN_DEL, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout.splitlines(), done.stderr) == (["the exception was dropped", "interrupted"], "")
