"""What an engine serves over HTTP: metrics for Prometheus, and whether the engine is healthy."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from millrace import Client, __version__
from millrace.embedded import EmbeddedServer
from tests.deploy.test_compose import SERVICES
from tests.e2e.conftest import StartEngine
from tests.e2e.engines import LIMIT_S, EngineProcess, wait_until

ANY_PORT = ("--metrics-port", "0")


def address_of(engine: EngineProcess) -> str:
    found = re.search(r"metrics and health on http://(\S+)", engine.text())
    assert found, engine.text()
    return found[1]


def fetch(engine: EngineProcess, path: str, accept: str = "") -> tuple[int, str]:
    """Return the status and the body of a page."""
    request = urllib.request.Request(f"http://{address_of(engine)}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def figures(engine: EngineProcess) -> dict[str, float]:
    """Return the values on the page by name and labels."""
    status, page = fetch(engine, "/metrics")
    assert status == 200
    families = list(text_string_to_metric_families(page))
    assert len({family.name for family in families}) == len(families)
    return {
        sample.name + "".join(f"[{value}]" for _, value in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def run_a_few(client: Client, num_jobs: int = 3) -> None:
    ids = [client.submit(prompt=f"{n} + 4 =", max_tokens=4, temperature=0.0) for n in range(num_jobs)]
    assert {client.wait(job_id, LIMIT_S).state for job_id in ids} == {"finished"}


def test_the_figures_are_those_of_the_work_that_was_done(start_engine: StartEngine, client: Client) -> None:
    engine = start_engine(*ANY_PORT)
    assert figures(engine)["millrace_jobs_total[finished]"] == 0
    run_a_few(client)
    client.wait(client.submit(prompt="x", n=64, max_tokens=100_000, deadline_s=0.3, ignore_eos=True), LIMIT_S)
    client.wait(client.submit(prompt_token_ids=[100_000]), LIMIT_S)
    wait_until(lambda: figures(engine)["millrace_jobs_open"] == 0)
    now = figures(engine)
    outcomes = {name: now[f"millrace_jobs_total[{name}]"] for name in ("finished", "expired", "failed", "lost")}
    assert outcomes == {"finished": 3, "expired": 1, "failed": 1, "lost": 0}
    assert now["millrace_request_queue_time_seconds_count"] == now["millrace_time_to_first_token_seconds_count"] == 4
    assert now["millrace_e2e_request_latency_seconds_count"] == now["millrace_request_prompt_tokens_count"] == 3
    ended_s, first_s = (now[f"millrace_{name}_seconds_sum"] for name in ("e2e_request_latency", "time_to_first_token"))
    assert ended_s > 0 and first_s >= now["millrace_request_queue_time_seconds_sum"] > 0
    assert 3 <= now["millrace_request_generation_tokens_sum"] <= 12
    assert now["millrace_prompt_tokens_total"] > now["millrace_request_prompt_tokens_sum"] > 0
    num_generated = now["millrace_generation_tokens_total"]
    assert num_generated >= client.stats().generated_tokens > 0
    assert 0 < now["millrace_inter_token_latency_seconds_count"] <= num_generated - 4
    steps = now["millrace_executor_steps_total"]
    assert now["millrace_step_seconds_count"] == now["millrace_step_seconds_bucket[+Inf]"] == steps > 4
    assert now["millrace_executor_requests_completed_total"] == now["millrace_executor_requests_total"] > steps
    assert now["millrace_rpc_seconds_sum"] > 0
    assert 0 < now["millrace_executor_device_seconds_total"] < now["millrace_step_seconds_sum"]
    assert now["millrace_executor_plan_bytes_total"] > 0
    assert now["millrace_executor_reply_bytes_total"] > 0
    assert (now["millrace_workers_active"], now["millrace_ranks"], now["millrace_ranks_wanted"]) == (1, 1, 1)
    assert (now["millrace_kv_cache_usage_perc"], now["millrace_healthy"], now["millrace_sleep_level"]) == (0, 1, 0)
    (engine_id,) = client.stats().sleep_levels
    assert any(re.match(rf"millrace_engine_info\[{engine_id}\].*\[{__version__}\]$", name) for name in now)
    assert now["process_resident_memory_bytes"] > 0
    assert fetch(engine, "/health") == (200, "serving\n")
    job_id = client.submit(prompt="x", n=64, max_tokens=900, ignore_eos=True, stream=True)
    next(iter(client.stream(job_id)))
    engine.process.send_signal(signal.SIGTERM)
    wait_until(lambda: fetch(engine, "/health") == (200, "draining\n"))
    assert engine.terminate() == 0


def test_one_engine_reports_the_whole_queue(start_engine: StartEngine, client: Client, queue_name: str) -> None:
    engine = start_engine(*ANY_PORT)
    client.pause()
    for priority in (0, 5):
        client.submit(prompt="x", max_tokens=10, priority=priority)
    waiting = client.submit(prompt="x", max_tokens=10, delay_s=1000)
    wait_until(lambda: figures(engine).get(f"millrace_queue_delayed_jobs[{queue_name}]") == 1)
    now = figures(engine)
    names = ("inbox_jobs", "ready_jobs", "running_jobs", "tokens", "engines", "paused", "rejected_total")
    assert [now[f"millrace_queue_{name}[{queue_name}]"] for name in names] == [0, 2, 0, 33, 1, 1, 0]
    wait_until(lambda: figures(engine)[f"millrace_queue_oldest_job_seconds[{queue_name}]"] > 1)
    client.cancel(waiting)
    client.wait(client.submit(prompt="x", deadline_s=0.1), LIMIT_S)
    ended = f"millrace_queue_ended_total[{queue_name}]"
    wait_until(lambda: figures(engine)[f"{ended}[expired]"] == figures(engine)[f"{ended}[cancelled]"] == 1)
    assert figures(engine)[f"{ended}[finished]"] == figures(engine)[f"{ended}[failed]"] == 0


def test_a_killed_worker_is_counted(start_engine: StartEngine, client: Client) -> None:
    engine = start_engine(*ANY_PORT)
    run_a_few(client)
    before = figures(engine)
    assert (before["millrace_worker_restarts_total"], before["millrace_worker_recovery_seconds"]) == (0, 0)
    os.kill(engine.worker_pids()[0], signal.SIGKILL)
    killed = "killed by SIGKILL (by the kernel if memory ran out: see dmesg)"
    reason = f"the workers are being restarted: rank 0 is gone: {killed}\n"
    wait_until(lambda: fetch(engine, "/health") == (503, reason), what=reason)
    run_a_few(client)
    after = figures(engine)
    assert (after["millrace_worker_restarts_total"], after["millrace_worker_failures_total"]) == (1, 1)
    assert after["millrace_worker_recovery_seconds"] > 0
    assert after["millrace_executor_steps_total"] > before["millrace_executor_steps_total"]
    assert after["millrace_kv_pool_epoch"] == before["millrace_kv_pool_epoch"] + 1
    wait_until(lambda: fetch(engine, "/health") == (200, "serving\n"))


@pytest.mark.faults
def test_a_frozen_worker_makes_the_engine_unhealthy_until_it_is_replaced(
    start_engine: StartEngine, client: Client
) -> None:
    engine = start_engine(*ANY_PORT)
    run_a_few(client)
    job_id = client.submit(prompt="A story:", max_tokens=900, ignore_eos=True, stream=True)
    next(iter(client.stream(job_id)))
    wait_until(lambda: fetch(engine, "/health") == (200, "serving\n"))
    os.kill(engine.worker_pids()[0], signal.SIGSTOP)
    reason = re.compile(r"a step has lasted \d+ s|the workers are being restarted")
    wait_until(lambda: reason.match(fetch(engine, "/health")[1]), what=reason.pattern)
    assert figures(engine)["millrace_healthy"] == 0
    wait_until(lambda: fetch(engine, "/health")[0] == 200)
    assert client.wait(job_id, LIMIT_S).state == "finished"


@pytest.mark.slow
def test_a_sleeping_engine_is_healthy_and_says_so(start_engine: StartEngine, client: Client) -> None:
    engine = start_engine(*ANY_PORT)
    client.sleep(2)
    wait_until(lambda: fetch(engine, "/health") == (200, "asleep, level 2\n"))
    assert figures(engine)["millrace_sleep_level"] == 2
    os.kill(engine.worker_pids()[0], signal.SIGKILL)
    wait_until(lambda: figures(engine)["millrace_worker_failures_total"] == 1)
    assert figures(engine)["millrace_workers_active"] == 0
    client.wake()
    wait_until(lambda: fetch(engine, "/health") == (200, "serving\n"))
    assert figures(engine)["millrace_workers_active"] == 1


@pytest.mark.slow
def test_an_engine_whose_heartbeat_does_not_reach_redis_is_unhealthy(tmp_path: Path) -> None:
    with EmbeddedServer() as server, EngineProcess(tmp_path / "log", server.url, "away", *ANY_PORT) as engine:
        engine.wait_until_serving()
        wait_until(lambda: fetch(engine, "/health")[0] == 200)
        server.kill()
        reason = re.compile(r"Redis has not taken a heartbeat for .* the limit is 3 s\n")
        wait_until(lambda: reason.fullmatch(fetch(engine, "/health")[1]), what=reason.pattern)
        server.start()
        wait_until(lambda: fetch(engine, "/health")[0] == 200)


def test_an_engine_that_cannot_write_results_is_unhealthy_and_claims_no_more_jobs(tmp_path: Path) -> None:
    with EmbeddedServer() as server, ExitStack() as stack:
        admin = stack.enter_context(redis.Redis.from_url(server.url))
        client = stack.enter_context(Client(server.url, "denied"))
        admin.execute_command("ACL SETUSER", "engine", "on", ">pw", "~*", "+@all")
        url = server.url.replace("unix://", "unix://engine:pw@", 1)
        engine = stack.enter_context(EngineProcess(tmp_path / "log", url, "denied", *ANY_PORT, heartbeat_s=1.0))
        engine.wait_until_serving()
        admin.execute_command("ACL SETUSER", "engine", "-xadd")
        first = client.submit(prompt="3 + 4 =", max_tokens=4)
        reason = re.compile(r".*\(the thread 'results-writer' has not been able to use Redis for [\d.]+ s\)\n")
        wait_until(lambda: reason.fullmatch(fetch(engine, "/health")[1]), what=reason.pattern)
        values = figures(engine)
        assert (values["millrace_healthy"], values["millrace_jobs_open"]) == (0, 0)
        assert values["millrace_redis_outage_seconds"] > 1
        assert values["millrace_unwritten_bytes"] > 0
        others = [client.submit(prompt="3 + 4 =", max_tokens=4) for _ in range(20)]
        time.sleep(1.0)
        assert (client.get(first).state, {client.get(each).state for each in others}) == ("running", {"queued"})
        admin.execute_command("ACL SETUSER", "engine", "+xadd")
        assert {job.state for job in client.as_completed([first, *others], LIMIT_S)} == {"finished"}
        wait_until(lambda: fetch(engine, "/health") == (200, "serving\n"))
        values = figures(engine)
        assert (values["millrace_redis_outage_seconds"], values["millrace_unwritten_bytes"]) == (0, 0)


def test_it_answers_while_the_model_is_loaded(launch: StartEngine, client: Client) -> None:
    engine = launch(*ANY_PORT)
    engine.wait_for_log("metrics and health on")
    assert fetch(engine, "/health") == (503, "the engine is starting\n")
    assert figures(engine)["millrace_healthy"] == 0
    assert container_check(engine) == 1
    engine.wait_until_serving()
    assert container_check(engine) == 0


def container_check(engine: EngineProcess) -> int:
    """Return the exit status of the compose file's health check."""
    kind, program, *arguments = SERVICES["engine-cpu"]["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "python")
    arguments = [argument.replace("127.0.0.1:9400", address_of(engine)) for argument in arguments]
    return subprocess.run([sys.executable, *arguments], capture_output=True, timeout=LIMIT_S).returncode


@pytest.mark.parametrize(
    ("options", "status", "complaint"),
    [
        # An engine that drains may have it, so another start can help.
        (("--metrics-port", "TAKEN"), 1, "metrics_port: can't listen on 127.0.0.1 port TAKEN: Address already in use"),
        (("--metrics-port", "70000"), 2, "metrics_port: must be 0 to 65535, got 70000"),
        (("--metrics-port", "0", "--metrics-host", "256.1.1.1"), 2, "metrics_port: can't listen on 256.1.1.1 port 0"),
    ],
)
def test_an_address_that_cannot_be_used_is_one_clear_error(
    launch: StartEngine, options: tuple[str, ...], status: int, complaint: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        engine = launch(*(option.replace("TAKEN", port) for option in options))
        assert engine.process.wait(LIMIT_S) == status
    assert engine.text().splitlines()[-1].startswith("millrace serve: " + complaint.replace("TAKEN", port))
    assert "Traceback" not in engine.text()
