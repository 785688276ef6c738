"""A process that renders chats for an engine, within limits of time and memory.

engine -> process   the ChatTemplate, once; then for each chat a Task
process -> engine   for each Task a Rendered
"""

from __future__ import annotations

import contextlib
import signal
from types import FrameType

import msgspec

from millrace.engine_service.chat.template import Chat, ChatTemplate, compile_template, render
from millrace.engine_service.child_process import limit_memory, open_channel, receive, send

MAX_MEMORY_BYTES = 512 * 1024 * 1024
_MAX_REASON_CHARS = 300


class Task(msgspec.Struct, frozen=True):
    """Render this chat with at most this CPU time."""

    chat: Chat
    limit_s: float


class Rendered(msgspec.Struct, frozen=True, omit_defaults=True):
    """Exactly one field is set; `is_slow`: the time was over."""

    text: str | None = None
    error: str | None = None
    is_slow: bool = False


class _TimeOver(BaseException):
    """Raised in a template by the timer. No `except Exception` of Jinja stops it."""


def main() -> None:
    channel = open_channel()
    signal.signal(signal.SIGPROF, _raise_time_over)
    limit_memory(MAX_MEMORY_BYTES)
    if (raw := receive(channel)) is None:
        return
    template = msgspec.json.decode(raw, type=ChatTemplate)
    for source in template.sources.values():
        with contextlib.suppress(Exception):  # each chat reports it
            compile_template(source)
    decoder = msgspec.json.Decoder(Task)
    while (raw := receive(channel)) is not None:
        send(channel, _answer(template, decoder.decode(raw)))


def _answer(template: ChatTemplate, task: Task) -> Rendered:
    try:
        try:
            # The second signal ends the process: the first one cannot interrupt a long call of C.
            signal.setitimer(signal.ITIMER_VIRTUAL, 2 * task.limit_s + 0.1)
            signal.setitimer(signal.ITIMER_PROF, task.limit_s, task.limit_s)
            return Rendered(text=render(template, task.chat).encode(errors="replace").decode())
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _TimeOver:
        signal.setitimer(signal.ITIMER_PROF, 0)  # it may have interrupted the `finally`
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return Rendered(is_slow=True)
    except MemoryError:
        return Rendered(error=f"it needs more than {MAX_MEMORY_BYTES // 2**20} MiB of memory")
    except Exception as error:  # a template is a program of the model's author: it can raise anything
        return Rendered(error=reason_of(error))


def reason_of(error: BaseException) -> str:
    return " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__


def _raise_time_over(number: int, frame: FrameType | None) -> None:
    raise _TimeOver


if __name__ == "__main__":
    main()
