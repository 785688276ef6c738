"""Render chats in processes of their own, so that no template can hang the engine or take its memory."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading

import msgspec

from millrace.engine_service.chat import render_process
from millrace.engine_service.chat.render_process import Rendered, Task
from millrace.engine_service.chat.template import Chat, ChatTemplate, TextError, render

QUICK_S = 0.05
"""CPU time of a chat in the claim thread. Usual chats need less than 1 ms; the others are rendered in `prepare`."""
LIMIT_S = 1.0
"""CPU time of any chat."""
_ANSWER_S = 30.0
"""How long a process may take for an answer, also on a machine that is too busy."""

_decode = msgspec.msgpack.Decoder(Rendered).decode


class SlowTemplate(TextError):
    """Raised when the template was stopped at its limit of CPU time."""


class Renderer:
    """Renders chats in the caller's process, without limits: for a program that renders its own chats."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template

    def render(self, chat: Chat, limit_s: float) -> str:
        """Return the prompt of a chat. Raises `TextError`."""
        try:
            return render(self.template, chat)
        except Exception as error:  # a template is a program of the model's author: it can raise anything
            raise _failure(render_process.reason_of(error)) from error


class ProcessRenderer(Renderer):
    """Owns the processes that render: as many as threads that render at the same time. Safe to use from several threads.

    The first chat starts a process. One that exceeds a limit and cannot be interrupted is replaced at the next chat.
    """

    def __init__(self, template: ChatTemplate) -> None:
        super().__init__(template)
        self._lock = threading.Lock()
        self._idle: list[_Process] = []

    def render(self, chat: Chat, limit_s: float) -> str:
        """Return the prompt of a chat. Raises `SlowTemplate` above `limit_s` of CPU time, and `TextError`."""
        process = self._take()
        try:
            rendered = process.render(Task(chat, limit_s))
        except BaseException:
            process.close()
            raise
        if rendered is None:
            process.close()
        else:
            with self._lock:
                self._idle.append(process)
        if rendered is None or rendered.is_slow:
            rule = "shorten them, or leave out chat_template_kwargs"
            raise SlowTemplate(f"the model's chat template takes more than {limit_s:g} s for these messages; {rule}")
        if rendered.text is None:
            raise _failure(rendered.error or "")
        return rendered.text

    def close(self) -> None:
        """End the processes that render nothing now. Those that do end with this process."""
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> _Process:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                process.close()
        return _Process(self.template)


class _Process:
    """Owns one process and the socket to it."""

    def __init__(self, template: ChatTemplate) -> None:
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(_ANSWER_S)
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, "-P", "-m", render_process.__name__, str(fd)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[fd])
        render_process.send(self._channel, template)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def render(self, task: Task) -> Rendered | None:
        """None: the process has ended, or does not answer."""
        raw = None
        with contextlib.suppress(OSError):
            render_process.send(self._channel, task)
            raw = render_process.receive(self._channel)
        return None if raw is None else _decode(raw)

    def close(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()


def _failure(reason: str) -> TextError:
    return TextError(f"the model's chat template can't render these messages: {reason}")
