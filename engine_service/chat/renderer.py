"""Render chats in processes of their own, so that no template can hang the engine or take its memory."""

from __future__ import annotations

import threading

import msgspec

from millrace.engine_service.chat import render_process
from millrace.engine_service.chat.render_process import Rendered, Task
from millrace.engine_service.chat.template import Chat, ChatTemplate, TextError, render
from millrace.engine_service.child_process import ChildProcess
from millrace.engine_service.errors import EngineError

_QUICK_S = 0.05
"""CPU time of a quick rendering. Usual chats need less than 1 ms."""
_LIMIT_S = 1.0
"""CPU time of any chat."""
_ANSWER_S = 1.0
"""How long a process may take for its answer besides that: more, and it hangs, or the machine is too busy."""
_BUSY_ANSWER_S = 30.0
"""The same for a new process, where nobody waits but chats like this one."""

_decode = msgspec.json.Decoder(Rendered).decode


class NotQuick(EngineError):
    """Raised where a claim may not wait: by a rendering that takes too long, and for a grammar that is to be checked first.
    Without haste both are possible."""

    def __init__(self, *, is_slow_template: bool) -> None:
        """`is_slow_template`: the template has used its CPU time. Otherwise no process has answered, or it is a grammar."""
        super().__init__("the job cannot be admitted quickly")
        self.is_slow_template = is_slow_template


class Renderer:
    """Renders chats in the caller's process, without limits: for a program that renders its own chats."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template

    def render(self, chat: Chat, *, is_quick: bool = False) -> str:
        """Return the prompt of a chat. Raises `TextError`, and `NotQuick` if `is_quick`."""
        try:
            return render(self.template, chat)
        except Exception as error:  # a template is a program of the model's author: it can raise anything
            raise _failure(render_process.reason_of(error)) from error


class ProcessRenderer(Renderer):
    """Owns the processes that render: as many as threads that render at the same time. Safe to use from several threads.

    The first chat starts a process. One that cannot be interrupted, or does not answer, is replaced.
    """

    def __init__(self, template: ChatTemplate) -> None:
        super().__init__(template)
        self._lock = threading.Lock()
        self._idle: list[ChildProcess] = []

    def render(self, chat: Chat, *, is_quick: bool = False) -> str:
        """As `Renderer.render`. Raises `EngineError`, too, if no process answers. `is_quick`: waits about 1 s at most."""
        task = Task(chat, _QUICK_S if is_quick else _LIMIT_S)
        rendered = self._run(task, task.limit_s + _ANSWER_S)
        if rendered is None:
            self.close()  # the idle processes may hang, too
        if is_quick and (rendered is None or rendered.is_slow):
            raise NotQuick(is_slow_template=rendered is not None)
        rendered = rendered or self._run(task, _BUSY_ANSWER_S)
        if rendered is None:
            rule = "the engine's machine is too busy; submit the chat again"
            raise EngineError(f"the chat was not rendered within {_BUSY_ANSWER_S:g} s; {rule}")
        if rendered.is_slow:
            rule = "shorten them, or leave out chat_template_kwargs"
            raise TextError(f"the model's chat template takes more than {_LIMIT_S:g} s for these messages; {rule}")
        if rendered.text is None:
            raise _failure(rendered.error or "")
        return rendered.text

    def close(self) -> None:
        """End the processes that render nothing now. Those that do end with this process."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()

    def _run(self, task: Task, wait_s: float) -> Rendered | None:
        """None: no answer."""
        process, answer = self._take(), None
        try:
            answer = process.ask(task, wait_s)
        except TimeoutError:
            return None
        finally:
            if answer is None:
                process.close()
        if answer is None:  # the process has ended, since nothing could interrupt the template
            return Rendered(is_slow=True)
        with self._lock:
            self._idle.append(process)
        return _decode(answer)

    def _take(self) -> ChildProcess:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                process.close()
        return ChildProcess(render_process.__name__, self.template, _BUSY_ANSWER_S)


def _failure(reason: str) -> TextError:
    return TextError(f"the model's chat template can't render these messages: {reason}")
