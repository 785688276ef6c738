"""How calls end, and what is recorded of them."""

from __future__ import annotations

import time

from millrace.executor.metrics import Recorder
from millrace.executor.wire.calls import CallTable
from millrace.executor.wire.messages import NO_TOKEN, RowFailure, SeqId, StepId, StepPlan, StepReply, StepResult


def test_a_row_that_failed_is_no_generated_token() -> None:
    recorder, loop = Recorder(), None
    calls = CallTable(loop, recorder)  # type: ignore[arg-type]
    plan = StepPlan(StepId(1), epoch=1, depth=1, num_tokens=2, num_sampled=2)
    call = calls.add(range(1), 0, 1.0, plan)
    result = StepResult(StepId(1), 1, [5, NO_TOKEN], [RowFailure(SeqId(2), "nan_logits", "")])
    calls.add_reply(0, StepReply(call.call_id, result), time.monotonic())
    assert call.done()
    assert recorder.num_tokens == 1
