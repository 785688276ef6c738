"""`millrace get`, `tail`, `cancel` and `ls`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from millrace.cli.exits import INVALID, NOT_FOUND, OK, CommandError
from millrace.cli.options import Verbs, add_json, add_verb, open_client, open_reconnecting_client
from millrace.cli.output import (
    counted_noun,
    duration,
    end_of,
    print_job,
    print_json,
    print_outputs,
    print_table,
    print_text,
    remark,
)
from millrace.cli.values import counted

if TYPE_CHECKING:
    from millrace.producer import Client
    from millrace.results.messages import Job, Position

_STATES = ("running", "queued", "delayed", "failed", "finished", "cancelled", "expired")


def add_parsers(verbs: Verbs) -> None:
    get = add_verb(verbs, "get", "show a job and its text so far")
    get.add_argument("id")
    add_json(get)
    get.set_defaults(run=run_get)

    tail = add_verb(verbs, "tail", "print a job's text while it is generated")
    tail.add_argument("id")
    tail.add_argument("--after", metavar="EVENT", help="start after this event, the `id` of a `--json` line")
    add_json(tail)
    tail.set_defaults(run=run_tail)

    cancel = add_verb(verbs, "cancel", "cancel queued or running jobs")
    cancel.add_argument("ids", nargs="*", metavar="id")
    cancel.add_argument("--batch", metavar="NAME", help="cancel every job of this batch")
    add_json(cancel)
    cancel.set_defaults(run=run_cancel)

    ls = add_verb(verbs, "ls", "list jobs: running, next to start, and last ended")
    ls.add_argument("--state", choices=_STATES, help="only jobs in this state")
    ls.add_argument("--limit", type=counted, default=50, metavar="N", help="list at most N jobs (default: %(default)s)")
    add_json(ls)
    ls.set_defaults(run=run_ls)


def run_get(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        job = client.get(args.id)
        place = client.position(args.id) if job.state in ("queued", "delayed") else None
    if args.json:
        print_job(job, **({"num_ahead": place.num_ahead, "eta_s": place.eta_s} if place else {}))
    else:
        _print_job(job, place)
    return OK


def run_tail(args: argparse.Namespace) -> int:
    with open_reconnecting_client(args) as client:
        return follow(client, args.id, after=args.after, as_json=args.json)


def follow(client: Client, job_id: str, *, after: str | None = None, as_json: bool = False) -> int:
    """Print a job's events until it ends. Return the exit status.

    Without `as_json` candidate 0 is printed as it comes, and the others at the end.
    """
    for event in client.stream(job_id, after=after):
        if as_json:
            print_json(event)
            continue
        if event.is_restart:
            remark(f"job {job_id!r} has lost events after {after}; its text follows from the beginning")
        if event.index == 0:
            print_text(event.text)
    if not as_json:
        print_text("\n")
    job = client.get(job_id)
    if not as_json:
        print_outputs(job, first=1)
    return end_of(job)


def run_cancel(args: argparse.Namespace) -> int:
    if bool(args.ids) == bool(args.batch):
        raise CommandError("cancel: give either job ids or --batch", INVALID)
    with open_client(args) as client:
        outcomes = client.cancel_batch(args.batch) if args.batch else client.cancel_many(args.ids)
    from millrace import JobNotFound

    status = OK
    for job_id, outcome in outcomes.items():
        if outcome == "unknown" and args.ids:
            remark(str(JobNotFound(job_id, args.queue)))
            status = NOT_FOUND
        elif args.json:
            print_json({"id": job_id, "outcome": outcome})
        else:
            print(f"{job_id}\t{outcome}")
    return status


def run_ls(args: argparse.Namespace) -> int:
    jobs = _list_jobs(args)
    if args.json:
        for job in jobs:
            print_job(job)
        return OK
    print_table(("id", "state", "tokens", "text or error"), [_row(job) for job in jobs], must_cut=True)
    return OK


def _list_jobs(args: argparse.Namespace) -> list[Job]:
    jobs: list[Job] = []
    with open_client(args) as client:
        for state in [args.state] if args.state else _STATES:
            if len(jobs) < args.limit:
                jobs += client.list_jobs(state, args.limit - len(jobs))
    return jobs


def _row(job: Job) -> tuple[str, str, str, str]:
    from millrace.results.errors import one_line

    shown = one_line(" ".join(job.text.split()), 60)
    if job.error:
        shown = "error: " + one_line(job.error.message.strip().partition("\n")[0])
    return job.id, job.state, str(len(job.token_ids)), shown


def _print_job(job: Job, place: Position | None) -> None:
    from millrace.results.errors import one_line

    print(f"{job.id}: {', '.join(one_line(fact) for fact in _facts(job, place))}")
    if any(output.text for output in job.outputs):
        print_outputs(job)


def _facts(job: Job, place: Position | None) -> list[str]:
    has_reason = job.finish_reason and job.finish_reason != job.state
    facts = [f"{job.state} ({job.finish_reason})" if has_reason else job.state]
    if job.usage:
        facts.append(f"{job.usage.prompt_tokens} prompt + {job.usage.completion_tokens} output tokens")
    if job.error:
        facts.append(job.error.message)
    if place and place.num_ahead is not None:
        facts.append(counted_noun(place.num_ahead, "job") + " ahead")
    if place and place.eta_s is not None:
        facts.append(f"starts in about {duration(place.eta_s)}")
    if job.num_retries:
        facts.append(f"retries: {job.num_retries}")
    if job.redriven_as:
        facts.append(f"run again as {job.redriven_as}")
    if not job.has_result:
        facts.append("its result has expired")
    return facts
