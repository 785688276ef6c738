"""`millrace get`, `tail`, `cancel`, `delete` and `ls`."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from millrace.cli.exits import INVALID, NOT_FOUND, OK, OTHER, CommandError
from millrace.cli.options import Verbs, add_json, add_verb, open_client, open_reconnecting_client
from millrace.cli.output import (
    OutputPrinter,
    print_job,
    print_json,
    print_outputs,
    print_table,
    remark,
    report_end,
)
from millrace.cli.progress import reporting
from millrace.cli.values import counted
from millrace.cli.wait_report import WaitReport, resumable, resume_with

if TYPE_CHECKING:
    from millrace.cli.reconnecting_client import ReconnectingClient
    from millrace.producer import Client
    from millrace.results.job import Job
    from millrace.results.keys import QueueKeys
    from millrace.results.scripts import Command

_MIN_LAST = 20
"""Characters that a terminal keeps for the last column of a list."""
_STATES = ("running", "queued", "delayed", "failed", "finished", "cancelled", "expired")


def add_parsers(verbs: Verbs) -> None:
    get = add_verb(verbs, "get", run_get, "show a job and its text so far")
    get.add_argument("id")
    add_json(get)

    tail = add_verb(verbs, "tail", run_tail, "print a job's text while it is generated")
    tail.add_argument("id")
    tail.add_argument("--after", metavar="EVENT", help="start after this event, the `id` of a `--json` line")
    add_json(tail)

    cancel = add_verb(verbs, "cancel", run_cancel, "cancel queued or running jobs")
    cancel.add_argument("ids", nargs="*", metavar="id")
    cancel.add_argument("--batch", metavar="NAME", help="cancel every job of this batch")
    cancel.add_argument("--waiting", action="store_true", help="cancel every job that waits; running jobs continue")
    add_json(cancel)

    delete = add_verb(verbs, "delete", run_delete, "delete jobs that have ended: their requests, outputs and records")
    delete.add_argument("ids", nargs="*", metavar="id")
    delete.add_argument("--batch", metavar="NAME", help="delete every job of this batch that has ended")
    add_json(delete)

    ls = add_verb(verbs, "ls", run_ls, "list jobs: running, next to start, and last ended")
    ls.add_argument("--state", choices=_STATES, help="only jobs in this state; of the last 10,000 that ended")
    ls.add_argument("--batch", metavar="NAME", help="only jobs of this batch, all that have a record")
    ls.add_argument("--rejected", action="store_true", help="inbox entries that could not become jobs, the last first")
    limit_help = "list at most N jobs, up to 10,000 without --batch (default: %(default)s)"
    ls.add_argument("--limit", type=counted, default=50, metavar="N", help=limit_help)
    add_json(ls)


def run_get(args: argparse.Namespace) -> int:
    from millrace.results.waiting import describe_running, describe_wait

    state, more = None, dict[str, Any]()
    with open_client(args) as client:
        job = client.get(args.id)
        if not job.is_done:
            stats = client.stats()
            if job.state == "running":
                state = describe_running(job, stats, args.queue)
            else:
                place = client.position(args.id)
                more = {name: getattr(place, name) for name in ("num_ahead", "eta_s", "needs_model")}
                state = describe_wait(place, stats, args.queue)
            more["obstacle"] = stats.obstacle_of(job.state)
    if args.json:
        print_job(job, **more)
    else:
        _print_job(job, state)
    return OK


def run_tail(args: argparse.Namespace) -> int:
    with open_reconnecting_client(args) as client:
        return follow(client, args, args.id, after=args.after)


def follow(client: Client, args: argparse.Namespace, job_id: str, after: str | None = None) -> int:
    """Print a job's events until it ends, with --json as JSON. Return the exit status.

    As text, candidate 0 is printed as it comes, and the others at the end.
    """
    last, printer = after, OutputPrinter()

    def hint() -> tuple[str, str]:
        return f"job {job_id!r} continues", resume_with(args, "tail", job_id, *(("--after", last) if last else ()))

    with resumable(hint), WaitReport(args, job_id) as report:
        for event in client.stream(job_id, after=after):
            report.clear()
            last = event.id
            if args.json:
                print_json(event.to_dict())
                continue
            if event.is_restart:
                remark(f"job {job_id!r} has lost events after {after}; its text follows from the beginning")
            if event.index == 0:
                printer.add(event)
    job = client.get(job_id)
    if not args.json:
        printer.end(is_finished=job.state == "finished")
        print_outputs(job, first=1)
    return report_end(job)


def run_cancel(args: argparse.Namespace) -> int:
    if bool(args.ids) + bool(args.batch) + args.waiting != 1:
        raise CommandError("cancel: give either job ids, --batch or --waiting", INVALID)
    from millrace.producer.calls import cancel_waiting
    from millrace.results.commands import cancel
    from millrace.results.waiting import describe_obstacle

    with open_reconnecting_client(args) as client:
        if args.waiting:
            before = client.stats()
            with reporting(args, before.queued + before.delayed) as report:
                outcomes = client.change(cancel_waiting, report)
        else:
            outcomes = _change(client, args, cancel)
        stats = client.stats() if "cancelling" in outcomes.values() else None
    if stats and stats.obstacle_of("running"):
        remark(f"jobs that run are cancelled by the next engine: {describe_obstacle(stats, args.queue)}")
    return _status(args, outcomes)


def run_delete(args: argparse.Namespace) -> int:
    if bool(args.ids) == bool(args.batch):
        raise CommandError("delete: give either job ids or --batch", INVALID)
    from millrace.results.commands import delete

    with open_reconnecting_client(args) as client:
        outcomes = _change(client, args, delete)
    if active := [job_id for job_id, outcome in outcomes.items() if outcome not in ("deleted", "unknown")]:
        from millrace.results.errors import some_ids

        remark(f"not deleted, since they have not ended; cancel them first: {some_ids(active)}")
        return OTHER
    return _status(args, outcomes)


def _change(
    client: ReconnectingClient, args: argparse.Namespace, change: Callable[[QueueKeys, str], Command]
) -> dict[str, str]:
    """Change the jobs of the command line, or of its batch. Return the outcome of each."""
    from millrace.producer.calls import change_many

    ids = list(dict.fromkeys(args.ids)) or client.batch_members(args.batch)
    with reporting(args, len(ids)) as report:
        return client.change(change_many, change, ids, report)


def _status(args: argparse.Namespace, outcomes: Mapping[str, str]) -> int:
    return NOT_FOUND if args.ids and "unknown" in outcomes.values() else OK


def run_ls(args: argparse.Namespace) -> int:
    if args.rejected:
        return _list_rejected(args)
    from millrace.results.waiting import describe_obstacle

    with open_reconnecting_client(args) as client:
        jobs = _list_jobs(client, args)
        stats = client.stats()
    if args.json:
        for job in jobs:
            print_job(job)
    else:
        print_table(*_columns(jobs), must_cut=True)
    if (obstacle := describe_obstacle(stats, args.queue)) and any(job.state == "queued" for job in jobs):
        remark(obstacle)
    return OK


def _list_rejected(args: argparse.Namespace) -> int:
    from millrace.results.errors import one_line
    from millrace.results.waiting import duration

    if args.state or args.batch:
        raise CommandError("ls: --rejected cannot be combined with --state or --batch", INVALID)
    with open_client(args) as client:
        entries = client.list_rejected(args.limit)
    if args.json:
        for entry in entries:
            print_json(entry)
        return OK
    rows = [
        (duration(_age_s(one.rejected_ms)), one.id or "-", f"{one_line(one.error.message)}: {one_line(one.raw, 200)}")
        for one in entries
    ]
    print_table(("age", "id", "error: entry"), rows, must_cut=True)
    return OK


def _age_s(time_ms: int) -> float:
    return max(0.0, time.time() - time_ms / 1000)


def _list_jobs(client: ReconnectingClient, args: argparse.Namespace) -> list[Job]:
    if args.batch:
        states = client.batch_jobs(args.batch)
        ids = sorted(states, key=lambda job_id: _STATES.index(states[job_id]))
        return client.find([job_id for job_id in ids if args.state in (None, states[job_id])], args.limit)
    if args.state:
        return client.list_jobs(args.state, args.limit)
    jobs: dict[str, Job] = {}
    # In the order in which jobs pass the states: one that goes on meanwhile is found, and its last state counts.
    for state in ("delayed", "queued", "running", "ended"):
        if state != "ended" or len(jobs) < args.limit:
            for job in client.list_jobs(state, args.limit):
                jobs.pop(job.id, None)
                jobs[job.id] = job
    return sorted(jobs.values(), key=lambda job: _STATES.index(job.state))[: args.limit]


_HEADINGS = ("id", "state", "tokens", "age", "attempt", "tenant", "engine", "prompt -> text")


def _columns(jobs: list[Job]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return headings and rows. On a terminal, later columns that say nothing, or do not fit, are left out."""
    rows = [_row(job) for job in jobs]
    if not sys.stdout.isatty():
        return _HEADINGS, rows
    num_left = shutil.get_terminal_size().columns - _MIN_LAST
    shown = []
    for column, heading in enumerate(_HEADINGS):
        values = {row[column] for row in rows}
        width = 2 + max(map(len, (heading, *values)))
        is_last = column == len(_HEADINGS) - 1
        if is_last or column < 4 or (not values <= {"-", "0", "1", "default"} and width <= num_left):
            shown.append(column)
            num_left -= width
    return tuple(_HEADINGS[column] for column in shown), [tuple(row[column] for column in shown) for row in rows]


def _row(job: Job) -> tuple[str, ...]:
    from millrace.results.errors import one_line
    from millrace.results.waiting import duration

    parts = [one_line(" ".join(text.split()), 60) for text in (job.prompt, job.content or job.text)]
    shown = " -> ".join(part for part in parts if part)
    if job.error:
        shown = "error: " + one_line(job.error.message.strip().partition("\n")[0])
    age = duration(_age_s(job.timings.created_ms))
    engine = (job.engine if job.state == "running" else None) or "-"
    return job.id, job.state, str(job.num_tokens), age, str(job.attempt), job.tenant, engine, shown


def _print_job(job: Job, state: str | None) -> None:
    from millrace.results.errors import one_line

    print(f"{job.id}: {', '.join(one_line(fact) for fact in _facts(job, state))}")
    if any(output.text for output in job.outputs):
        print_outputs(job)


def _facts(job: Job, state: str | None) -> list[str]:
    """Return what there is to say of a job. `state` describes that of a job that has not ended."""
    from millrace.results.errors import one_line
    from millrace.results.waiting import duration

    has_reason = job.finish_reason and job.finish_reason != job.state
    why = "length: cut at the limit of tokens" if job.finish_reason == "length" else job.finish_reason
    facts = [state or (f"{job.state} ({why})" if has_reason else job.state)]
    if not job.is_done:
        facts.append(f"submitted {duration(_age_s(job.timings.created_ms))} ago")
        facts += [f"tenant {job.tenant}"] if job.tenant != "default" else []
        facts.append(f"prompt: {one_line(' '.join(job.prompt.split()), 60)}")
    if job.usage:
        cached = f" ({job.usage.cached_tokens} cached)" if job.usage.cached_tokens else ""
        facts.append(f"{job.usage.prompt_tokens} prompt{cached} + {job.usage.completion_tokens} output tokens")
    if job.error:
        facts.append(job.error.message)
    if job.num_retries:
        facts.append(f"retries: {job.num_retries}")
    if job.redriven_as:
        facts.append(f"run again as {job.redriven_as}")
    if not job.has_result:
        facts.append("its result has expired")
    return facts + (_run_facts(job) if job.usage else [])


def _run_facts(job: Job) -> list[str]:
    """Return how a job that has ended was run."""
    times = job.timings.durations.items()
    durations = [f"{name.removesuffix('_s')} {value:.2f} s" for name, value in times if value is not None]
    where = [f"attempt {job.attempt}"] if job.attempt else []
    return [*durations, *where, *([f"engine {job.engine}"] if job.engine else [])]
