"""`millrace pause` and `resume`: stop starting the jobs of a queue, and start them again."""

from __future__ import annotations

import argparse

from millrace.cli.exits import OK
from millrace.cli.options import Verbs, add_verb, open_client


def add_parsers(verbs: Verbs) -> None:
    pause = add_verb(verbs, "pause", "stop starting jobs; running jobs finish, and new jobs are accepted")
    pause.set_defaults(run=run, is_paused=True)
    resume = add_verb(verbs, "resume", "start the jobs of a paused queue again")
    resume.set_defaults(run=run, is_paused=False)


def run(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        client.pause() if args.is_paused else client.resume()
    return OK
