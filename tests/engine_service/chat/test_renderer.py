"""The processes that render chats: what a template may cost, and what becomes of it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from millrace.engine_service.chat.renderer import NotQuick, ProcessRenderer, Renderer
from millrace.engine_service.chat.template import Chat, ChatTemplate, TextError
from millrace.engine_service.errors import EngineError
from millrace.executor.environment import SECRETS
from tests.engine_service.chat.models import template_of
from tests.processes import environment_of

Make = Callable[[str], ProcessRenderer]
LOOP = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


_ANSWER_S = "millrace.engine_service.chat.renderer._ANSWER_S"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(_ANSWER_S, 120.0)  # a process on a loaded machine is not one that does not answer
    with ExitStack() as stack:

        def build(source: str) -> ProcessRenderer:
            renderer = ProcessRenderer(ChatTemplate({"default": source}))
            stack.callback(renderer.close)
            return renderer

        yield build


def chat(**kwargs: Any) -> Chat:
    return Chat(messages=[{"role": "user", "content": "Hi 🌍"}], chat_template_kwargs=kwargs)


def pids(renderer: ProcessRenderer) -> list[int]:
    return [process._process.pid for process in renderer._idle]


@pytest.mark.parametrize("family", ["hermes", "llama3"])
def test_a_process_renders_what_this_process_would(family: str) -> None:
    with ExitStack() as stack:
        renderer = ProcessRenderer(template_of(family))
        stack.callback(renderer.close)
        long = Chat(messages=[{"role": "user", "content": "wörter " * 100_000}])
        for each in (chat(), long, chat(enable_thinking=False)):
            assert renderer.render(each) == Renderer(renderer.template).render(each)
        assert len(pids(renderer)) == 1


def test_the_process_gets_no_logins_of_the_engine(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "login")
    renderer = make("done")
    assert renderer.render(chat()) == "done"
    (pid,) = pids(renderer)
    variables = environment_of(pid)
    assert (set(SECRETS & variables.keys()), variables["PATH"]) == (set(), os.environ["PATH"])


def test_integers_of_more_than_64_bits_reach_the_template(make: Make) -> None:
    assert make("{{ k }}").render(chat(k=[2**70, -(2**63) - 1])) == f"[{2**70}, {-(2**63) - 1}]"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('Roles\nmust alternate') }}", "these messages: Roles must alternate"),
        ("{{ messages[0].a.b }}", "has no attribute 'a'"),
        ("{% for i in messages", "unexpected end of template"),
        ("Hi\n{{ messages }", "these messages: line 2: unexpected '}'"),
        ("{{ range(k) }}", "Range too big"),
        ("{{ 'a' * k }}", "it needs more than 512 MiB of memory"),
        ("{% for i in range(90000) %}{{ 'a' * 100 }}{% endfor %}", "the text has more than 4,194,304 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_fails_is_an_error_of_the_chat_and_the_process_goes_on(
    source: str, words: str, make: Make
) -> None:
    renderer = make(source)
    for _ in range(2):
        with pytest.raises(TextError, match=r"^the model's chat template can't render these messages: ") as error:
            renderer.render(chat(k=10**10))
        assert words in str(error.value)
        assert len(str(error.value)) < 500
    assert len(pids(renderer)) == 1


def test_a_template_that_loops_is_stopped_and_its_process_goes_on(make: Make) -> None:
    renderer = make("{% if loops is defined %}" + LOOP + "{% endif %}done")
    assert renderer.render(chat()) == "done"
    before = pids(renderer)
    with pytest.raises(NotQuick) as error:
        renderer.render(chat(loops=True), is_quick=True)
    assert error.value.is_slow_template
    with pytest.raises(TextError, match="takes more than 1 s for these messages; shorten them, or leave out"):
        renderer.render(chat(loops=True))
    assert renderer.render(chat()) == "done"
    assert pids(renderer) == before


def test_a_call_that_nothing_can_interrupt_costs_the_process_and_the_next_chat_has_another(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.engine_service.chat.renderer._QUICK_S", 0.2)
    renderer = make("{{ 'done' if k is not defined else ([['x'] * k] * k).count(['x'] * k) }}")
    assert renderer.render(chat()) == "done"
    before = pids(renderer)
    with pytest.raises(NotQuick):
        renderer.render(chat(k=500_000), is_quick=True)  # minutes in one call of C
    assert pids(renderer) == []
    assert renderer.render(chat()) == "done"
    assert pids(renderer) != before


def test_a_process_that_was_killed_is_replaced(make: Make) -> None:
    renderer = make("done")
    renderer.render(chat())
    (process,) = renderer._idle
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait()
    assert renderer.render(chat()) == "done"


@pytest.mark.parametrize("content", ["Hi", "word " * 200_000])
def test_a_process_that_is_stopped_is_replaced_and_a_quick_chat_does_not_wait_for_that(
    content: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ANSWER_S, 1.0)
    renderer, long = make("{{ messages[0].content }}"), Chat(messages=[{"role": "user", "content": content}])
    for is_quick in (False, True):
        renderer.render(chat())
        (stopped,) = pids(renderer)
        os.kill(stopped, signal.SIGSTOP)
        if is_quick:
            with pytest.raises(NotQuick) as error:
                renderer.render(long, is_quick=True)
            assert not error.value.is_slow_template
            assert pids(renderer) == []
        assert renderer.render(long) == content
        assert stopped not in pids(renderer)


def test_a_chat_that_no_process_renders_is_not_the_senders_fault(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.engine_service.chat.renderer._BUSY_ANSWER_S", 0.001)
    renderer = make("done")
    monkeypatch.setattr(_ANSWER_S, -0.999)
    with pytest.raises(
        EngineError, match=r"was not rendered within 0\.001 s; the engine's machine is too busy"
    ) as error:
        renderer.render(chat())
    assert not isinstance(error.value, TextError)


def test_ctrl_c_is_for_the_engine_alone(make: Make) -> None:
    renderer = make("done")
    renderer.render(chat())
    (before,) = pids(renderer)
    os.kill(before, signal.SIGINT)
    assert renderer.render(chat()) == "done"
    assert pids(renderer) == [before]


def test_a_chat_of_another_thread_does_not_wait_for_one_that_loops(make: Make) -> None:
    renderer = make("{% if loops is defined %}" + LOOP + "{% endif %}done")
    renderer.render(chat())
    ended: list[str] = []

    def loop() -> None:
        with pytest.raises(TextError):
            renderer.render(chat(loops=True))
        ended.append("loop")

    thread = threading.Thread(target=loop)
    thread.start()
    while renderer._idle:
        pass
    renderer.render(chat())
    ended.append("other")
    thread.join()
    assert ended == ["other", "loop"]
