"""A worker that dies, and engines that drain. All five invariants hold."""

from __future__ import annotations

import itertools
import os
import signal

import pytest

from millrace import LLM
from millrace.engine_service.engine import Progress
from tests.chaos.checker import ALL, Invariant
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import LIMIT_S, wait_until
from tests.chaos.workload import Undisturbed, make_jobs
from tests.e2e.engines import TINY

pytestmark = [pytest.mark.faults, TEST_LIMIT]


def test_a_worker_is_killed_and_its_engine_goes_on_with_the_same_jobs(place: Place) -> None:
    engine = place.engine(heartbeat_s=20.0)
    ids = place.submit(make_jobs(12, max_tokens=600))
    wait_until(lambda: place.num_tokens_kept() > 12 * 64)
    engine.kill_worker()
    place.wait_all()
    place.check(ALL, engine)
    assert engine.text().count("restarting the workers") == 1
    assert {place.record(job_id)["attempt"] for job_id in ids} == {"1"}


def test_an_offline_batch_survives_its_worker(undisturbed: Undisturbed) -> None:
    jobs = make_jobs(8, max_tokens=600)
    with LLM(TINY, device="cpu", executor="mp") as llm:
        step, numbers = llm._engine.step, itertools.count(1)

        def step_and_kill() -> list[Progress]:
            if next(numbers) == 50:
                os.kill(llm._engine._executor.worker_pids()[0], signal.SIGKILL)  # type: ignore[attr-defined]
            return step()

        llm._engine.step = step_and_kill  # type: ignore[method-assign]
        outputs = llm.generate([job.prompt or "" for job in jobs], [job.sampling for job in jobs], use_tqdm=False)
    expected = undisturbed.outputs(jobs).values()
    assert [output.outputs[0].text for output in outputs] == [one[0].text for one in expected]


def test_sigterm_inside_the_grace_ends_what_runs(place: Place) -> None:
    engine = place.engine("--drain-grace", "60", heartbeat_s=20.0)
    ids = place.submit(make_jobs(8, max_tokens=300))
    wait_until(lambda: place.num_tokens_kept() > 8 * 64)
    place.check(ALL, engine)
    assert {place.record(job_id)["attempt"] for job_id in ids} == {"1"}
    assert place.client.stats().engines == 0


def test_sigterm_past_the_grace_gives_back_what_runs_with_its_tokens(place: Place) -> None:
    reserve = place.reserve(heartbeat_s=20.0)
    engine = place.engine("--drain-grace", "0", heartbeat_s=20.0)
    ids = place.submit(make_jobs(8, max_tokens=600))
    wait_until(lambda: place.num_tokens_kept() > 8 * 64)
    assert engine.terminate() == 0
    engine.check_kv_returned()
    kept = {job_id: len(place.tokens_kept(job_id)) for job_id, state in place.states().items() if state == "queued"}
    assert sum(kept.values()) > 64
    heir = reserve.call()
    place.wait_all()
    place.check(ALL, heir)
    rest = sum(len(place.client.get(job_id).token_ids) - num_tokens for job_id, num_tokens in kept.items())
    assert heir.num_sampled() <= rest + len(kept), "it goes on after the tokens that were kept"
    assert {place.record(job_id)["attempt"] for job_id in ids} == {"1"}


def test_a_second_sigterm_gives_back_what_runs_without_waiting(place: Place) -> None:
    """No other engine runs: the jobs are queued with their tokens so far, and the attempt does not count."""
    engine = place.engine("--drain-grace", "600", heartbeat_s=20.0)
    ids = place.submit(make_jobs(12, max_tokens=600))
    wait_until(lambda: place.num_tokens_kept() > 12 * 64)
    before = {job_id: place.tokens_kept(job_id) for job_id in ids}
    engine.process.send_signal(signal.SIGTERM)
    engine.wait_for_log("draining", LIMIT_S)
    place.check(ALL - {Invariant.ENDED}, engine)
    expected = place.expected(place.accepted.values())
    given_back = [job_id for job_id, state in place.states().items() if state == "queued"]
    assert given_back
    for job_id in given_back:
        kept = place.tokens_kept(job_id)
        assert kept and len(kept) >= len(before[job_id])
        assert kept == expected[job_id][0].token_ids[: len(kept)]
        assert place.record(job_id)["attempt"] == "0"


def test_a_worker_that_dies_while_its_engine_drains_is_not_replaced(place: Place) -> None:
    """As when a supervisor signals all processes of a service: running jobs are given back at once, whatever the grace."""
    reserve = place.reserve(heartbeat_s=20.0)
    engine = place.engine("--drain-grace", "600", heartbeat_s=20.0)
    ids = place.submit(make_jobs(12, max_tokens=600))
    wait_until(lambda: place.num_tokens_kept() > 12 * 64)
    engine.process.send_signal(signal.SIGTERM)
    engine.wait_for_log("draining", LIMIT_S)
    engine.kill_worker()
    assert engine.process.wait(LIMIT_S) == 0
    assert "restarting the workers" not in engine.text()
    assert "queued" in place.states().values()
    heir = reserve.call()
    place.wait_all()
    place.check(ALL, heir)
    assert {place.record(job_id)["attempt"] for job_id in ids} == {"1"}


@pytest.mark.slow
def test_killed_while_it_drains(place: Place) -> None:
    reserve = place.reserve()
    engine = place.engine("--drain-grace", "60")
    place.submit(make_jobs(8, max_tokens=900))
    wait_until(lambda: place.num_tokens_kept() > 8 * 64)
    engine.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "draining" in engine.text())
    engine.kill()
    heir = reserve.call()
    place.wait_all()
    place.check(ALL, heir)
