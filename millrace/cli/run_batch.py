"""`millrace run-batch`: answer a file of requests in OpenAI's batch format, through a queue or with an engine of its own."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from millrace.cli.exits import INVALID, OK, OTHER, CommandError, sigterm_interrupts
from millrace.cli.options import Verbs, add_verb
from millrace.cli.output import CUT, remark
from millrace.cli.progress import ProgressReport
from millrace.cli.submit import add_sampling_options
from millrace.cli.values import TO_CONTEXT, integer
from millrace.cli.wait_report import WaitReport

if TYPE_CHECKING:
    from millrace.cli.batch_files import InputLine, OutputFile
    from millrace.producer.openai_format import AnsweredLine
    from millrace.results.messages import Submission

MAX_OPEN = 10_000
"""Jobs of a run that are in the queue at a time: more than the engines of a large service run at once."""

_DELETED_TOGETHER = 200
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
"""Sampling parameters that are options for all lines."""
_EPILOG = """The answers come in the order in which they are ready, and are brought into the order of the input at the end.
If the command ends early for whatever reason, run it again: it continues, and no line is missing or doubled. The exit
status is 4 at such an end, and 1 if the output is complete and a line was refused or has failed."""


def add_parsers(verbs: Verbs) -> None:
    parser = add_verb(verbs, "run-batch", run, "answer a file of requests in OpenAI's batch format", epilog=_EPILOG)
    requests_help = "requests, one JSON per line; may be compressed by gzip"
    parser.add_argument(
        *("-i", "--input", "--input-file"), type=Path, required=True, metavar="FILE", help=requests_help
    )
    parser.add_argument(
        *("-o", "--output", "--output-file"), type=Path, required=True, metavar="FILE", help="a file for the answers"
    )
    retry_help = "answer the lines again that have failed or were refused in a complete output"
    parser.add_argument("--retry-failed", action="store_true", help=retry_help)
    parser.add_argument("--model", metavar="DIR_OR_ID", help="start a private Redis, and an engine with this model")
    parser.add_argument(
        "--generation-config",
        default="auto",
        metavar="SOURCE",
        help="where sampling parameters come from that neither a line nor an option gives: auto (the "
        "generation_config.json of --model), a model's directory, or vllm (nowhere)",
    )
    parser.add_argument("--tenant", metavar="NAME", help="the account that the jobs belong to")
    parser.add_argument(
        "--priority", type=integer, metavar="N", help="priority of lines without one; lower numbers first"
    )
    parser.add_argument(
        "engine_options", nargs="*", metavar="-- OPTION", help="with --model: options of `millrace serve`"
    )
    add_sampling_options(parser, _SAMPLING)
    _explain_engine_options(parser)


def _explain_engine_options(parser: argparse.ArgumentParser) -> None:
    """Make the parser say where the options of `millrace serve` stand, if it meets one of them first."""
    refuse = parser.error

    def error(message: str) -> NoReturn:
        found = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if found and (option := found[1]) in _engine_options():
            rule = f"is an option of `millrace serve`; write it behind --, as in --model DIR_OR_ID -- {option}"
            message = f"{option}: {rule}"
        refuse(message)

    parser.error = error  # type: ignore[method-assign]


def _engine_options() -> Container[str]:
    """Return the options of `millrace serve`; nothing where only the client is installed."""
    try:
        from millrace.engine_service.config import make_parser
    except ImportError:
        return ()
    return make_parser()._option_string_actions


def run(args: argparse.Namespace) -> int:
    if args.model and args.redis:
        raise CommandError("--model: starts a Redis of its own; leave out --redis, or --model", INVALID)
    if args.engine_options and not args.model:
        raise CommandError(f"{args.engine_options[0]}: is an option of an engine; it needs --model", INVALID)
    from millrace.cli.batch_files import OutputFile, read_input
    from millrace.cli.submit_file import check_options
    from millrace.results.waiting import counted_noun

    options = {name: each for name in ("tenant", "priority", *_SAMPLING) if (each := getattr(args, name)) is not None}
    if options.get("max_tokens") == TO_CONTEXT:
        raise CommandError("--max-tokens: must be a number", INVALID)
    check_options(options)
    source = read_input(args.input)
    with sigterm_interrupts(), OutputFile(args.output, source, options) as output:
        if args.retry_failed:
            output.retry_failed()
        if output.num_written < source.num_lines:
            defaults = {**_generation_config(args), **options}
            run_ = _Run(output, source.num_lines, defaults, has_own_queue=bool(args.model))
            cancel = "" if args.model else f"; to cancel its jobs: millrace cancel --batch {output.batch}"
            with _continuable(output, source.num_lines, cancel), _service(args) as (redis_url, check):
                run_.answer(source.lines(), redis_url, args.queue, check)
        output.complete()
        num_lines = counted_noun(output.num_written, "line")
        if output.num_cut:
            remark(f"{output.num_cut:,} of {num_lines}: {CUT}")
        remark(f"{args.output}: {num_lines}{_failures(output)}")
        return OTHER if output.num_failed else OK


def _generation_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters of the model's generation_config.json. Raises CommandError if they are not valid."""
    from millrace.cli.serve import require_engine
    from millrace.engine_service.errors import ConfigurationError
    from millrace.engine_service.model_files import default_sampling, resolve_model
    from millrace.producer import InvalidRequest, SamplingParams

    source, revision = args.generation_config, None
    try:
        if source == "auto" and args.model:
            require_engine()
            from millrace.engine_service.config import parse

            config = parse(["--model", args.model, *args.engine_options])
            source, revision = config.model, config.revision
        if source in ("auto", "vllm"):
            return {}
        found = default_sampling(resolve_model(source, revision))
        SamplingParams(**found)
    except ConfigurationError as error:
        raise CommandError(str(error), INVALID) from error
    except InvalidRequest as error:
        rule = "correct it, or leave it out with --generation-config vllm"
        raise CommandError(f"{source}: generation_config.json is not valid: {error}; {rule}", INVALID) from error
    return found


def _failures(output: OutputFile) -> str:
    """Return how many lines failed, and the reason of the first of them."""
    from millrace.results.errors import one_line

    if output.first_failed is None:
        return ""
    number, reason = output.first_failed
    return f", {output.num_failed:,} of them refused or failed; the first is line {number}: {one_line(reason, 200)}"


@contextlib.contextmanager
def _continuable(output: OutputFile, num_lines: int, cancel: str) -> Iterator[None]:
    """Report at an early end that the same command continues, but not where that needs another command first."""
    from millrace.cli.batch_files import INCOMPLETE
    from millrace.results.errors import InvalidRedisURL, JobNotFound, QueueError

    def written() -> str:
        return f"{output.num_written:,} of {num_lines:,} lines are written; the same command continues"

    try:
        yield
    except KeyboardInterrupt:
        remark(written() + (cancel if output.has_begun else ""))
        raise
    except (QueueError, CommandError) as error:
        if isinstance(error, InvalidRedisURL) or (isinstance(error, CommandError) and error.status == INVALID):
            raise
        reason = str(error)
        if isinstance(error, JobNotFound):
            reason = f"the server has lost jobs of this run ({error.job_id} is unknown)"
        raise CommandError(f"not complete ({written()}): {reason}", INCOMPLETE) from error


@contextlib.contextmanager
def _service(args: argparse.Namespace) -> Iterator[tuple[str | None, Callable[[], None]]]:
    """Yield the URL of the server, and a function that raises CommandError when our own engine has ended."""
    if not args.model:
        with WaitReport(args):
            yield args.redis, lambda: None
        return
    from millrace.cli.local_engine import local_engine

    remark(f"starting an engine with {args.model}")
    with local_engine(["--model", args.model, *args.engine_options], args.queue) as (redis_url, engine):

        def check() -> None:
            if engine.has_ended():
                raise CommandError("the engine ended before its jobs did")

        yield redis_url, check


class _Run:
    """Submits what the output lacks, and writes the answers."""

    def __init__(self, output: OutputFile, num_lines: int, defaults: dict[str, Any], *, has_own_queue: bool) -> None:
        """`defaults`: the tenant of all jobs, and fields for lines that lack them, as far as they are given.
        `has_own_queue`: whether the queue, with its jobs, is gone at the end of this command."""
        self._output = output
        self._has_own_queue = has_own_queue
        self._tenant = {name: value for name, value in defaults.items() if name == "tenant"}
        self._defaults = {name: value for name, value in defaults.items() if name != "tenant"}
        self._open: dict[str, AnsweredLine] = {}
        """By line id: the lines whose jobs are in the queue."""
        self._progress = ProgressReport(
            num_lines, "lines", "answered", output.num_written, is_shown=sys.stderr.isatty()
        )

    def answer(self, lines: Iterator[InputLine], redis_url: str | None, queue: str, check: Callable[[], None]) -> None:
        from millrace.cli.reconnecting_client import ReconnectingClient
        from millrace.producer import InvalidRequest
        from millrace.producer.openai_format import ended_line, refused_line

        written: list[str] = []
        with ReconnectingClient(redis_url, queue=queue) as client, self._progress:
            if not self._has_own_queue:
                client.look_up([self._output.batch])  # if the server cannot be used, the run has not begun
                self._output.begin()
            for line_id, end in client.run_all(self._jobs(lines), max_open=MAX_OPEN, check=check):
                line = self._open.pop(line_id)
                if isinstance(end, InvalidRequest):
                    self._output.write(refused_line(line_id, line.custom_id, end, line.aliases))
                else:
                    self._output.write(ended_line(line_id, line, end))
                    written.append(end.id)
                if self._has_own_queue and len(written) >= _DELETED_TOGETHER:  # nobody else can read them
                    client.delete_many(written)
                    written.clear()
                self._progress.show(self._output.num_written)

    def _jobs(self, lines: Iterator[InputLine]) -> Iterator[Submission]:
        """Yield the jobs that the output lacks. Write the errors of those that cannot run."""
        import msgspec

        from millrace.cli.batch_files import MAX_LINE_BYTES, custom_id_of
        from millrace.producer import InvalidRequest
        from millrace.producer.openai_format import parse_line, refused_line
        from millrace.producer.wire import to_submission

        for number, text in lines:
            if self._output.has(number):
                continue
            line_id = self._output.id_of(number)
            try:
                if text is None:
                    raise InvalidRequest("line", f"is longer than {MAX_LINE_BYTES:,} bytes; shorten the prompt")
                line, request = parse_line(text, self._defaults)
                request = msgspec.structs.replace(request, id=line_id, **self._tenant)
                job = to_submission(request, batch=self._output.batch)
            except InvalidRequest as error:
                self._output.write(refused_line(line_id, custom_id_of(text), error))
            else:
                self._open[line_id] = line
                yield job
