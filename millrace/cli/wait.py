"""`millrace wait`: wait for jobs, print their results, and report meanwhile why they do not end."""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from millrace.cli.exits import INVALID, NOT_FOUND, OK, CommandError
from millrace.cli.options import Verbs, add_json, add_verb, open_reconnecting_client
from millrace.cli.output import (
    CUT,
    Remarks,
    print_job,
    print_outputs,
    remark,
    remark_on_lost,
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
    from millrace.results.errors import JobNotFound
    from millrace.results.job import Job


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
        ids = list(dict.fromkeys(args.ids)) or client.batch_members(args.batch)
        how_to_resume = resume_with(args, "wait", *args.ids, *(("--batch", args.batch) if args.batch else ()))
        printer = ResultPrinter(client, args, is_batch=bool(args.batch))
        with resumable(lambda: (printer.written(), how_to_resume)), printer:
            printer.add(ids)
            return printer.finish()


def wait_for_job(client: ReconnectingClient, args: argparse.Namespace, job_id: str) -> int:
    """Wait for one job and print its texts, or with --json the job. Return the exit status."""
    client.limit_waiting(args.timeout)
    hint = f"job {job_id!r} continues", resume_with(args, "wait", job_id)
    with resumable(lambda: hint), WaitReport(args, job_id):
        job = client.wait(job_id, timeout_s=args.timeout)
    print_job(job) if args.json else print_outputs(job)
    return report_end(job)


class ResultPrinter:
    """Prints each of some jobs as JSON when it ends, and owns what is counted of them. A context: reports the progress, and
    why no job begins."""

    def __init__(self, client: ReconnectingClient, args: argparse.Namespace, *, is_batch: bool = False) -> None:
        """`is_batch`: they are all of a batch, so the new jobs of those that were run again are among them, and count."""
        self._client, self._args, self._is_batch = client, args, is_batch
        self._follower = client.follower()
        self._report = WaitReport(args)
        self._without_result = Remarks("jobs have no result")
        self._status = OK
        self._num_ended = self._num_rerun = self._num_lost = self._num_cut = 0
        self.progress = ProgressReport(None, "jobs", "ended")
        self.num_jobs = self.num_written = 0

    def __enter__(self) -> Self:
        self.progress.__enter__()
        self._report.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._report.__exit__()
        self.progress.__exit__()

    def add(self, job_ids: Sequence[str]) -> None:
        """Wait for these jobs too. Their ids are new here."""
        from millrace.producer.arguments import is_job_id
        from millrace.results.errors import JobNotFound

        self.num_jobs += len(job_ids)
        self._follower.add(list(filter(is_job_id, job_ids)))
        for job_id in itertools.filterfalse(is_job_id, job_ids):
            self._print(JobNotFound(job_id, self._args.queue))

    def print_ended(self, most_s: float = math.inf) -> None:
        """Print the jobs that have ended, as soon as there are some. Wait no longer than `most_s`."""
        if self._follower.is_done:
            time.sleep(most_s)
            return
        for job in self._client.ended(self._follower, most_s):
            self._print(job)

    def _print(self, job: Job | JobNotFound) -> None:
        # An unknown job of a batch has ended at some time; another one may never have been there.
        self._num_ended += self._is_batch or not isinstance(job, Exception)
        if isinstance(job, Exception):
            self._num_lost += 1
            if not self._is_batch:
                self._without_result.add(str(job))
                self._status = NOT_FOUND
        elif self._is_batch and job.redriven_as:
            self._num_rerun += 1
        else:
            self.num_written += 1  # first: printing may be interrupted
            print_job(job)
            self._status = max(self._status, report_failure(job, self._without_result.add))
            self._num_cut += was_cut(job)
        self.progress.show(self._num_ended)

    def finish(self) -> int:
        """Wait for all jobs. Return the exit status."""
        from millrace.results.waiting import counted_noun

        self.progress.total = self.num_jobs
        self._client.limit_waiting(self._args.timeout)
        self._follower.limit(self._args.timeout)
        while not self._follower.is_done:
            self.print_ended()
        self._without_result.end()
        remark_on_redrives(self._num_rerun)
        if self._num_cut:
            remark(f"{self._num_cut} of {counted_noun(self.num_jobs, 'job')}: {CUT}")
        if self._is_batch:
            self._status = max(self._status, remark_on_lost(self._num_lost, self.num_jobs))
        return self._status

    def written(self) -> str:
        return f"{self.num_written} of {self.num_jobs} results are written, the other jobs continue"
