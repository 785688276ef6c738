"""`millrace get`, `tail`, `cancel` and `ls`: what became of jobs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from millrace.cli.exits import INVALID, NOT_FOUND, OK, CommandError
from millrace.cli.options import Verbs, add_json, add_verb, open_client
from millrace.cli.output import duration, end_of, print_json, print_table, print_text, remark
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
    tail.add_argument("--after", metavar="EVENT", help="go on after this event, the `id` of a `--json` line")
    add_json(tail)
    tail.set_defaults(run=run_tail)

    cancel = add_verb(verbs, "cancel", "stop jobs, queued or running")
    cancel.add_argument("ids", nargs="*", metavar="id")
    cancel.add_argument("--batch", metavar="NAME", help="every job of this batch")
    add_json(cancel)
    cancel.set_defaults(run=run_cancel)

    ls = add_verb(verbs, "ls", "list jobs: those that run, those next in line, those that ended last")
    ls.add_argument("--state", choices=_STATES, help="only jobs in this state")
    ls.add_argument("--limit", type=counted, default=50, metavar="N", help="at most so many (default: %(default)s)")
    add_json(ls)
    ls.set_defaults(run=run_ls)


def run_get(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        job = client.get(args.id)
        place = client.position(args.id) if job.state in ("queued", "delayed") else None
    if args.json:
        print_json(_with_place(job, place))
    else:
        _print_job(job, place)
    return OK


def run_tail(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        return follow(client, args.id, after=args.after, as_json=args.json)


def follow(client: Client, job_id: str, *, after: str | None = None, as_json: bool = False) -> int:
    """Print a job's events until it ends; the exit status says how it ended."""
    for event in client.stream(job_id, after=after):
        if as_json:
            print_json(event)
            continue
        if event.is_restart:
            remark(f"the stream of job {job_id!r} has lost events after {after}: here is all of it, from the beginning")
        print_text(event.text)
    if not as_json:
        print_text("\n")
    return end_of(client.get(job_id))


def run_cancel(args: argparse.Namespace) -> int:
    if bool(args.ids) == bool(args.batch):
        raise CommandError("cancel: name jobs, or give --batch", INVALID)
    with open_client(args) as client:
        outcomes = client.cancel_batch(args.batch) if args.batch else client.cancel_many(args.ids)
    status = OK
    for job_id, outcome in outcomes.items():
        if outcome == "unknown" and args.ids:
            remark(f"no job {job_id!r} in queue {args.queue!r}: never submitted, or its result has expired")
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
            print_json(job)
        return OK
    print_table(("id", "state", "tokens", "text"), [_row(job) for job in jobs])
    return OK


def _list_jobs(args: argparse.Namespace) -> list[Job]:
    jobs: list[Job] = []
    with open_client(args) as client:
        for state in [args.state] if args.state else _STATES:
            if len(jobs) < args.limit:
                jobs += client.list_jobs(state, args.limit - len(jobs))
    return jobs


def _row(job: Job) -> tuple[str, str, str, str]:
    text = " ".join(job.text.split())
    return job.id, job.state, str(len(job.token_ids)), text if len(text) <= 60 else text[:59] + "…"


def _print_job(job: Job, place: Position | None) -> None:
    facts = [job.state]
    if job.finish_reason and job.finish_reason != job.state:
        facts.append(f"({job.finish_reason})")
    if job.usage:
        facts.append(f"{job.usage.prompt_tokens} + {job.usage.completion_tokens} tokens")
    if job.error:
        facts.append(job.error.message)
    print(", ".join([f"{job.id}: {' '.join(facts)}", *_remarks(job, place)]))
    if job.text:
        print_text(job.text + "\n")


def _remarks(job: Job, place: Position | None) -> list[str]:
    remarks = []
    if place and place.num_ahead is not None:
        remarks.append(f"{place.num_ahead} ahead of it")
    if place and place.eta_s is not None:
        remarks.append(f"begins in about {duration(place.eta_s)}")
    if job.num_retries:
        remarks.append(f"retries so far: {job.num_retries}")
    if job.redriven_as:
        remarks.append(f"run again as {job.redriven_as}")
    if not job.has_result:
        remarks.append("its result has expired")
    return remarks


def _with_place(job: Job, place: Position | None) -> Job | dict[str, Any]:
    import msgspec

    return {**msgspec.structs.asdict(job), "num_ahead": place.num_ahead, "eta_s": place.eta_s} if place else job
