"""`millrace wait`: wait for jobs, print their results, and report meanwhile why they do not end."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from millrace.cli.exits import INVALID, OK, CommandError
from millrace.cli.options import Verbs, add_json, add_verb, open_reconnecting_client
from millrace.cli.output import (
    CUT,
    print_job,
    print_outputs,
    remark,
    remark_on_redrives,
    report_end,
    report_failure,
    was_cut,
)
from millrace.cli.progress import ProgressReport
from millrace.cli.values import seconds
from millrace.cli.wait_report import WaitReport, resumable, resume_with

if TYPE_CHECKING:
    from millrace.cli.reconnecting_client import ReconnectingClient


def add_parsers(verbs: Verbs) -> None:
    wait = add_verb(
        verbs, "wait", run, "wait for jobs and print their results; the text of one job, else one JSON object each"
    )
    wait.add_argument("ids", nargs="*", metavar="id")
    wait.add_argument("--batch", metavar="NAME", help="wait for every job of this batch")
    add_timeout(wait, "stop waiting after this time")
    add_json(wait)


def add_timeout(parser: argparse.ArgumentParser, what: str) -> None:
    help_ = f"{what} (a server that does not answer is given up after 20 s)"
    parser.add_argument("--timeout", type=seconds, metavar="SECONDS", help=help_)


def run(args: argparse.Namespace) -> int:
    if bool(args.ids) == bool(args.batch):
        raise CommandError("wait: give either job ids or --batch", INVALID)
    with open_reconnecting_client(args) as client:
        if len(args.ids) == 1:
            return wait_for_job(client, args, args.ids[0])
        if args.ids:
            return wait_for_jobs(client, args, args.ids, resume_with(args, "wait", *args.ids))
        ids = list(client.batch_jobs(args.batch))
        return wait_for_jobs(client, args, ids, resume_with(args, "wait", "--batch", args.batch), is_batch=True)


def wait_for_job(client: ReconnectingClient, args: argparse.Namespace, job_id: str) -> int:
    """Wait for one job and print its texts, or with --json the job. Return the exit status."""
    client.limit_waiting(args.timeout)
    hint = f"job {job_id!r} continues", resume_with(args, "wait", job_id)
    with resumable(lambda: hint), WaitReport(args, job_id):
        job = client.wait(job_id, timeout_s=args.timeout)
    print_job(job) if args.json else print_outputs(job)
    return report_end(job)


def wait_for_jobs(
    client: ReconnectingClient,
    args: argparse.Namespace,
    ids: Sequence[str],
    how_to_resume: str,
    *,
    is_batch: bool = False,
) -> int:
    """Wait for jobs and print each as JSON when it ends. Return the exit status. `is_batch`: they are all of a batch, so the
    new jobs of those that were run again are among them, and count."""
    from millrace.results.waiting import counted_noun

    client.limit_waiting(args.timeout)
    status, num_ended, num_rerun, num_cut = OK, 0, 0, 0
    progress = ProgressReport(len(ids), "jobs", "ended")
    with (
        resumable(lambda: (f"{num_ended} of {len(ids)} jobs have ended, the others continue", how_to_resume)),
        progress,
        WaitReport(args),
    ):
        for job in client.as_completed(ids, timeout_s=args.timeout):
            num_ended += 1
            progress.show(num_ended)
            if is_batch and job.redriven_as:
                num_rerun += 1
                continue
            print_job(job)
            status = max(status, report_failure(job))
            num_cut += was_cut(job)
    remark_on_redrives(num_rerun)
    if num_cut:
        remark(f"{num_cut} of {counted_noun(len(ids), 'job')}: {CUT}")
    return status
