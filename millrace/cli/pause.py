"""`millrace pause` and `resume`: whether engines get jobs from a queue."""

from __future__ import annotations

import argparse

from millrace.cli.exits import OK
from millrace.cli.options import Verbs, add_verb, open_client


def add_parsers(verbs: Verbs) -> None:
    pause = add_verb(verbs, "pause", "hand out no more jobs of a queue; what runs goes on, and new ones come in")
    pause.set_defaults(run=run_pause)
    resume = add_verb(verbs, "resume", "hand out a paused queue's jobs again")
    resume.set_defaults(run=run_resume)


def run_pause(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        client.pause()
    return OK


def run_resume(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        client.resume()
    return OK
