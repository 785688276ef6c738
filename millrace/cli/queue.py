"""`millrace stats`, `queues`, `settings`, `batch`, `pause` and `resume`: the counts of queues and batches, and whether jobs
start."""

from __future__ import annotations

import argparse
import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from millrace.cli.exits import INVALID, NOT_FOUND, OK, OTHER, CommandError
from millrace.cli.options import Verbs, add_json, add_verb, command_line, open_client, open_reconnecting_client
from millrace.cli.output import print_job, print_json, print_table, remark, remark_on_lost, remark_on_redrives
from millrace.cli.values import counted
from millrace.cli.wait_report import warn_if_never_served

if TYPE_CHECKING:
    from millrace.results.counts import QueueStats
    from millrace.results.job import Job

_SLEEP_STATES = ("awake", "asleep, weights in host memory", "asleep, weights dropped")
"""By sleep level."""
_QUEUE_COUNTS = ("engines", "inbox", "queued", "delayed", "running", "finished", "failed")
_BATCH_COUNTS = ("queued", "delayed", "running", "finished", "failed", "cancelled", "expired", "total")


def add_parsers(verbs: Verbs) -> None:
    stats = add_verb(verbs, "stats", run_stats, "show the job and token counts of a queue, and its engines")
    stats.add_argument("--min-engines", type=counted, metavar="N", help="fail if fewer engines have a heartbeat")
    stats.add_argument("--tenants", action="store_true", help="show what waits of each tenant instead")
    add_json(stats)

    queues = add_verb(
        verbs, "queues", run_queues, "list the queues of the server: their counts, and why no jobs start", queue=None
    )
    add_json(queues)

    settings = add_verb(
        verbs, "settings", run_settings, "show the limits, times and weights of a queue, or change some"
    )
    change_help = "set it, such as max_queued_jobs=1000 or weight:TENANT=2; without a VALUE it gets its default again"
    settings.add_argument("changes", nargs="*", metavar="NAME=VALUE", help=change_help)
    add_json(settings)

    batch = verbs.add_parser("batch", help="show a batch of jobs", description="Show a batch of jobs.")
    whats = batch.add_subparsers(metavar="WHAT", required=True)
    status = add_verb(whats, "status", run_batch_status, "count the jobs of a batch by state")
    status.add_argument("batch")
    add_json(status)

    results = add_verb(
        whats, "results", run_batch_results, "print the jobs of a batch that have ended, one JSON object each"
    )
    results.add_argument("batch")
    results.add_argument("-o", "--output", metavar="FILE", help="write them into this file, at the end in one go")
    add_json(results)

    pause = add_verb(verbs, "pause", run_pause, "stop starting jobs; running jobs finish, and new jobs are accepted")
    pause.set_defaults(is_paused=True)
    resume = add_verb(verbs, "resume", run_pause, "start the jobs of a paused queue again")
    resume.set_defaults(is_paused=False)


def run_stats(args: argparse.Namespace) -> int:
    if args.tenants:
        return _show_tenants(args)
    with open_client(args) as client:
        counts = client.stats()
    from millrace.results.waiting import counted_noun, describe_obstacle

    if args.json:
        print_json(_with_obstacle(counts))
    else:
        names = [name for name in counts.__struct_fields__ if type(getattr(counts, name)) is int]
        rows = [(name.replace("_", " "), str(getattr(counts, name))) for name in names]
        rows.append(("paused", "yes" if counts.is_paused else "no"))
        for engine_id, level in sorted(counts.sleep_levels.items()):
            model = counts.models.get(engine_id)
            rows.append((f"engine {engine_id}", _SLEEP_STATES[level] + (f", serves {model}" if model else "")))
        print_table(("name", "value"), rows)
    if args.min_engines and counts.engines < args.min_engines:
        verb = "has" if counts.engines == 1 else "have"
        found = counted_noun(counts.engines, "engine")
        raise CommandError(f"queue {args.queue}: {found} {verb} a heartbeat, {args.min_engines} required")
    if not args.json and (obstacle := describe_obstacle(counts, args.queue)):
        remark(obstacle)
    return OK


def _show_tenants(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        tenants = client.tenants()
    if args.json:
        for name, counts in tenants.items():
            print_json({"tenant": name, "waiting_jobs": counts.waiting_jobs, "waiting_tokens": counts.waiting_tokens})
    else:
        rows = [(name, str(counts.waiting_jobs), str(counts.waiting_tokens)) for name, counts in tenants.items()]
        print_table(("tenant", "waiting jobs", "waiting tokens"), rows)
    return OK


def run_queues(args: argparse.Namespace) -> int:
    from millrace.results.queue import find_queues

    rows = []
    for name, stats in find_queues(args.redis):
        if args.queue not in (None, name):
            continue
        if args.json:
            print_json({"queue": name, **_with_obstacle(stats)})
        counts = [str(getattr(stats, field)) for field in _QUEUE_COUNTS]
        models = ", ".join(sorted({model for model in stats.models.values() if model}))
        rows.append((name, *counts, (stats.obstacle or "").replace("_", " "), models))
    if args.queue is not None and not rows:
        raise CommandError(f"queue {args.queue}: is not there; `millrace queues` lists those that are", NOT_FOUND)
    if not args.json:
        print_table(("queue", *_QUEUE_COUNTS, "obstacle", "models"), rows)
    return OK


def run_settings(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        client.set_settings(dict(map(_change, args.changes)))
        found = client.settings()
    from millrace.results.settings import SETTINGS, setting

    if args.json:
        print_json(found)
        return OK
    rows = []
    for name in dict.fromkeys((*SETTINGS, *found)):
        known = setting(name)
        rows.append((name, found.get(name, ""), known.default if known else "unknown: has no effect"))
    print_table(("setting", "value", "default"), rows)
    return OK


def _change(text: str) -> tuple[str, float | None]:
    name, separator, value = text.partition("=")
    if not separator:
        raise CommandError(f"settings: write NAME=VALUE, such as max_queued_jobs=1000, got {text!r}", INVALID)
    if not value:
        return name, None
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return name, kind(value)
    raise CommandError(f"settings: {name}: must be a number, got {value!r}", INVALID)


def _with_obstacle(stats: QueueStats) -> dict[str, Any]:
    import msgspec

    return {**msgspec.structs.asdict(stats), "obstacle": stats.obstacle}


def run_batch_status(args: argparse.Namespace) -> int:
    from millrace.results.waiting import describe_obstacle, duration

    with open_client(args) as client:
        status = client.batch_status(args.batch)
        obstacle = describe_obstacle(client.stats(), args.queue) if status.num_open else None
    if args.json:
        print_json(status)
        return OK
    rows = [(name, str(getattr(status, name))) for name in _BATCH_COUNTS]
    rows += [("of these run again", str(status.redriven))] if status.redriven else []
    if status.num_open and not obstacle:
        rows.append(("time left", duration(status.eta_s)))
    print_table(("jobs", "count"), rows)
    if obstacle:
        remark(obstacle)
    return OK


def run_batch_results(args: argparse.Namespace) -> int:
    from millrace.results.messages import TERMINAL_STATES

    num_rerun = num_expired = 0

    def results(jobs: Iterable[Job]) -> Iterator[Job]:
        nonlocal num_rerun, num_expired
        for job in jobs:
            if job.redriven_as:
                num_rerun += 1
                continue
            num_expired += job.state == "finished" and not job.has_result
            yield job

    with open_reconnecting_client(args) as client:
        members = client.batch_members(args.batch)
        known = client.look_up(members)
        ended = [job_id for job_id, job in known.items() if job.state in TERMINAL_STATES]
        jobs = results(client.as_completed(ended))
        if args.output:
            _write_jobs(args.output, jobs)
        else:
            for job in jobs:
                print_job(job)
    remark_on_redrives(num_rerun)
    if num_expired:
        remark(f"{num_expired} of {len(ended)} results have expired: has_result is false, and the text is empty")
    if len(ended) < len(known):
        wait = command_line(args, "wait", "--batch", args.batch)
        remark(f"{len(known) - len(ended)} of {len(known)} jobs have not ended; to wait for them: {wait}")
    return max(OTHER if num_expired else OK, remark_on_lost(len(members) - len(known), len(members)))


def _write_jobs(path: str, jobs: Iterable[Job]) -> None:
    """Write a file that is complete or not there, or into what is no file, such as a pipe."""
    import msgspec

    target = os.path.realpath(path)  # a link stays one
    is_file = os.path.isfile(target) or not os.path.exists(target)
    written = f"{target}.{uuid.uuid4().hex[:8]}.part" if is_file else target
    try:
        with open(written, "xb" if is_file else "wb") as file:
            file.writelines(msgspec.json.encode(job.to_dict()) + b"\n" for job in jobs)
        if is_file:
            os.replace(written, target)
    except BaseException as error:
        if is_file:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(written)
        if isinstance(error, OSError):
            raise CommandError(f"{path}: {error.strerror}") from error
        raise


def run_pause(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        client.pause() if args.is_paused else client.resume()
        warn_if_never_served(client, args.queue)
    return OK
