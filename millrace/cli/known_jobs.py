"""What `millrace submit` reports about jobs that were in the queue before: they are not submitted again."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from millrace.cli.options import command_line
from millrace.cli.output import remark

if TYPE_CHECKING:
    from millrace.producer.calls import KnownJob

_MOST_IDS = 5
"""Largest number of ids in a command that the user can copy."""


def report_known(args: argparse.Namespace, known: Mapping[str, KnownJob], num_new: int) -> None:
    """Report on stderr how many jobs are new, the states of the others, and what to do for those without a result."""
    from millrace.results.errors import some_ids
    from millrace.results.messages import WITHOUT_RESULT

    if not known:
        return
    counts = ", ".join(
        f"{count} {state}" for state, count in Counter(job.state for job in known.values()).most_common()
    )
    remark(f"jobs: {num_new} new, {len(known)} in the queue already ({counts})")
    if redriven := [f"{job_id} (as {job.redriven_as})" for job_id, job in known.items() if job.redriven_as]:
        remark(f"already run again: {some_ids(redriven)}")
    ended = [job_id for job_id, job in known.items() if job.state in WITHOUT_RESULT and not job.redriven_as]
    invalid = dict.fromkeys(job_id for job_id in ended if known[job_id].error_kind == "invalid_request")
    if invalid:
        remark(f"not run again, since their requests are invalid and would fail again: {some_ids(list(invalid))}")
    if lost := [job_id for job_id in ended if job_id not in invalid]:
        again = command_line(args, "retry", *_which(lost, {known[job_id].batch for job_id in lost}))
        remark(f"not run again, since they have ended without a result: {some_ids(lost)}; to run them: {again}")
    batches = {job.batch for job in known.values() if job.batch != args.batch}
    if args.batch and batches:
        others = [job_id for job_id, job in known.items() if job.batch != args.batch]
        where = some_ids(sorted(batch for batch in batches if batch)) or "none"
        remark(f"not in batch {args.batch!r}, since a job stays in its first batch ({where}): {some_ids(others)}")


def _which(lost: list[str], batches: set[str | None]) -> list[str]:
    """Return the arguments of `millrace retry` for these jobs."""
    if len(lost) <= _MOST_IDS:
        return lost
    (batch,) = batches if len(batches) == 1 else (None,)
    return ["--batch", batch] if batch else ["ID..."]
