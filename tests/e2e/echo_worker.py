"""A worker that answers a chat with the text of its last message, of a user or of a tool, so that a test chooses the output.
Run as a program, this module is the engine service with this worker."""

from __future__ import annotations

import sys
from typing import Any

from millrace.executor.wire.messages import StepRow, WorkerConfig
from tests.executor.stub import StubWorker

END, USER = 1, 3
"""Ids of <|end|> and <|user|> in the tiny model's vocabulary."""
TEMPLATE = """\
{% for message in messages %}\
<|{{ 'user' if message.role == 'tool' else message.role }}|>{{ message.content or '' }}<|end|>\
{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}{% if opens_reasoning is defined %}<think>{% endif %}"""


def create_worker(rank: int, world_size: int, epoch: int, config: WorkerConfig, rendezvous: str) -> EchoWorker:
    return EchoWorker(epoch, config, rank, world_size)


class EchoWorker(StubWorker):
    def _run(self, row: StepRow) -> int | None:
        if super()._run(row) is None:
            return None
        sequence = self._sequences[row.seq_id]
        token_ids = sequence.token_ids
        token_ids[-1] = END  # what the stub has chosen might be a mark
        *_, message = (at + 1 for at, token_id in enumerate(token_ids) if token_id == USER)
        answer = token_ids[message : token_ids.index(END, message)]
        num_outputs = len(token_ids) - 1 - sequence.num_prompt_tokens
        if num_outputs < len(answer):
            token_ids[-1] = answer[num_outputs]
        return token_ids[-1]


def main(arguments: list[str]) -> int:
    from millrace.engine_service import build
    from millrace.engine_service import serve as service

    make: Any = build.make_executor  # type: ignore[attr-defined]
    build.make_executor = lambda *args, **kw: make(*args, worker_module="tests.e2e.echo_worker", **kw)  # type: ignore[attr-defined]
    return service.main(arguments)


if __name__ == "__main__":
    if "--identity" in sys.argv:
        from millrace.executor.rank.serve import serve_rank

        sys.exit(serve_rank(create_worker))
    sys.exit(main(sys.argv[1:]))
