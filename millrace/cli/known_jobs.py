"""What `millrace submit` reports of jobs that the queue has had before: a job is submitted once."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping

from millrace.cli.options import command_line
from millrace.cli.output import remark

KnownJobs = Mapping[str, tuple[str, str | None]]
"""By id: the state and the batch of a job."""
_MOST_IDS = 5
"""Ids that a command to copy names."""


def report_known(args: argparse.Namespace, known: KnownJobs, num_new: int) -> None:
    """Report on stderr how many jobs are new, the states of the others, and what to do for those without a result."""
    from millrace.results.errors import some_ids
    from millrace.results.messages import WITHOUT_RESULT

    if not known:
        return
    counts = ", ".join(
        f"{count} {state}" for state, count in Counter(state for state, _ in known.values()).most_common()
    )
    remark(f"jobs: {num_new} new, {len(known)} in the queue already ({counts})")
    lost = [job_id for job_id, (state, _) in known.items() if state in WITHOUT_RESULT]
    if lost:
        again = command_line(args, "retry", *_which(lost, {known[job_id][1] for job_id in lost}))
        remark(f"not run again, since they have ended without a result: {some_ids(lost)}; to run them: {again}")
    batches = {batch for _, batch in known.values() if batch != args.batch}
    if args.batch and batches:
        others = [job_id for job_id, (_, batch) in known.items() if batch != args.batch]
        where = some_ids(sorted(batch for batch in batches if batch)) or "none"
        remark(f"not in batch {args.batch!r}, since a job stays in its first batch ({where}): {some_ids(others)}")


def _which(lost: list[str], batches: set[str | None]) -> list[str]:
    """Return the arguments of `millrace retry` for these jobs."""
    if len(lost) <= _MOST_IDS:
        return lost
    (batch,) = batches if len(batches) == 1 else (None,)
    return ["--batch", batch] if batch else ["ID..."]
