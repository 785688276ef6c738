"""`millrace retry`: run failed jobs again, as new jobs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from millrace.cli.exits import INVALID, OK, CommandError, as_exit
from millrace.cli.options import Verbs, add_json, add_verb, open_reconnecting_client
from millrace.cli.output import print_fields, remark
from millrace.cli.progress import reporting

if TYPE_CHECKING:
    from millrace.producer import Client


def add_parsers(verbs: Verbs) -> None:
    retry = add_verb(verbs, "retry", run, "run failed, expired or cancelled jobs again, as new jobs with the same body")
    retry.add_argument("ids", nargs="*", metavar="id")
    retry.add_argument("--all", action="store_true", help="every failed job of the queue whose request is valid")
    batch_help = "every job of this batch that has failed, expired or been cancelled, and whose request is valid"
    retry.add_argument("--batch", metavar="NAME", help=batch_help)
    add_json(retry)


def run(args: argparse.Namespace) -> int:
    if [bool(args.ids), args.all, bool(args.batch)].count(True) != 1:
        raise CommandError("retry: give either job ids, --all or --batch", INVALID)
    from millrace.producer import calls

    with open_reconnecting_client(args) as client:
        if not args.ids:
            with reporting(args, None, "redriven_as") as report:
                batch = (args.batch,) if args.batch else ()
                retried = client.change(calls.retry_batch if batch else calls.retry_all, *batch, report)
            if retried.left_out:
                from millrace.results.errors import some_ids

                remark(f"left out, since their requests are invalid and would fail again: {some_ids(retried.left_out)}")
        return max((_retry(client, job_id, as_json=args.json) for job_id in args.ids), default=OK)


def _retry(client: Client, job_id: str, *, as_json: bool) -> int:
    """Run one job again, or report why not. Return the exit status."""
    from millrace import CannotRedrive, JobNotFound

    try:
        print_fields(id=job_id, redriven_as=client.retry(job_id), as_json=as_json)
    except (JobNotFound, CannotRedrive) as error:
        status, message = as_exit(error)
        remark(message)
        return status
    return OK
