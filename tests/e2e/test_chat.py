"""Chats of a service: its template, and what a template that loops costs others."""

from __future__ import annotations

from pathlib import Path

from millrace import Client
from tests.e2e.conftest import StartEngine
from tests.e2e.engines import LIMIT_S
from tests.engine_service.chat.models import TINY, model_with_template

LOOPS = (
    "{% for i in range(loops | default(0)) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    "{% if reason is defined %}{{ raise_exception(reason) }}{% endif %}"
)


def test_a_template_that_loops_or_raises_fails_its_chat_and_disturbs_no_other_job(
    client: Client, start_engine: StartEngine, tmp_path: Path
) -> None:
    source = LOOPS + (TINY / "chat_template.jinja").read_text()
    start_engine(model=model_with_template(tmp_path / "model", source))
    chat = [{"role": "user", "content": "What is 20 + 22?"}]
    running = client.submit("A story:", max_tokens=300, ignore_eos=True, stream=True)
    next(iter(client.stream(running)))
    looping = [
        client.submit(messages=chat, chat_template_kwargs={"loops": 90_000}, tenant="loops", max_retries=0)
        for _ in range(3)
    ]
    others = [
        client.submit(prompt="3 + 4 =", max_tokens=4, temperature=0.0),
        client.submit(messages=chat, max_tokens=16, temperature=0.0),
    ]
    assert [client.wait(job_id, LIMIT_S).text.strip() for job_id in others] == ["7", "20 + 22 = 42"]
    assert client.wait(running, LIMIT_S).state == "finished"
    for job_id in looping:
        job = client.wait(job_id, LIMIT_S)
        assert job.error is not None
        assert (job.state, job.error.kind, job.error.field) == ("failed", "invalid_request", "messages")
        assert "the model's chat template takes more than 1 s for these messages" in job.error.message
    raising = client.submit(messages=chat, chat_template_kwargs={"reason": "Roles must\nalternate"})
    error = client.wait(raising, LIMIT_S).error
    assert error is not None
    assert error.message.endswith("can't render these messages: Roles must alternate")
    assert client.wait(client.submit(messages=chat, max_tokens=16, temperature=0.0), LIMIT_S).text.strip() == (
        "20 + 22 = 42"
    )
