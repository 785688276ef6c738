"""The processes that render chats: what a template may cost, and what becomes of it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from millrace.engine_service.chat.renderer import LIMIT_S, ProcessRenderer, Renderer, SlowTemplate
from millrace.engine_service.chat.template import Chat, ChatTemplate, TextError
from tests.engine_service.chat.models import template_of

Make = Callable[[str], ProcessRenderer]
LOOP = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


@pytest.fixture
def make() -> Iterator[Make]:
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
            assert renderer.render(each, LIMIT_S) == Renderer(renderer.template).render(each, LIMIT_S)
        assert len(pids(renderer)) == 1


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('Roles\nmust alternate') }}", "these messages: Roles must alternate"),
        ("{{ messages[0].a.b }}", "has no attribute 'a'"),
        ("{% for i in messages", "unexpected end of template"),
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
            renderer.render(chat(k=10**10), LIMIT_S)
        assert words in str(error.value)
        assert len(str(error.value)) < 500
    assert len(pids(renderer)) == 1


def test_a_template_that_loops_is_stopped_and_its_process_goes_on(make: Make) -> None:
    renderer = make("{% if loops is defined %}" + LOOP + "{% endif %}done")
    assert renderer.render(chat(), LIMIT_S) == "done"
    before = pids(renderer)
    with pytest.raises(SlowTemplate, match=r"takes more than 0\.05 s for these messages"):
        renderer.render(chat(loops=True), 0.05)
    assert renderer.render(chat(), LIMIT_S) == "done"
    assert pids(renderer) == before


def test_a_call_that_nothing_can_interrupt_costs_the_process_and_the_next_chat_has_another(make: Make) -> None:
    renderer = make("{{ 'done' if k is not defined else ('ab' * k).replace('a', '')[0] }}")
    assert renderer.render(chat(), LIMIT_S) == "done"
    before = pids(renderer)
    with pytest.raises(SlowTemplate, match="leave out chat_template_kwargs"):
        renderer.render(chat(k=80_000_000), 0.2)
    assert pids(renderer) == []
    assert renderer.render(chat(), LIMIT_S) == "done"
    assert pids(renderer) != before


def test_a_process_that_was_killed_is_replaced(make: Make) -> None:
    renderer = make("done")
    renderer.render(chat(), LIMIT_S)
    (process,) = renderer._idle
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait()
    assert renderer.render(chat(), LIMIT_S) == "done"


def test_ctrl_c_is_for_the_engine_alone(make: Make) -> None:
    renderer = make("done")
    renderer.render(chat(), LIMIT_S)
    (before,) = pids(renderer)
    os.kill(before, signal.SIGINT)
    assert renderer.render(chat(), LIMIT_S) == "done"
    assert pids(renderer) == [before]


def test_a_chat_of_another_thread_does_not_wait_for_one_that_loops(make: Make) -> None:
    renderer = make("{% if loops is defined %}" + LOOP + "{% endif %}done")
    renderer.render(chat(), LIMIT_S)
    ended: list[str] = []

    def loop() -> None:
        with pytest.raises(SlowTemplate):
            renderer.render(chat(loops=True), 1.0)
        ended.append("loop")

    thread = threading.Thread(target=loop)
    thread.start()
    while renderer._idle:
        pass
    renderer.render(chat(), LIMIT_S)
    ended.append("other")
    thread.join()
    assert ended == ["other", "loop"]
