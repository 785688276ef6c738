"""`millrace serve` with a cluster and with a restricted user, and an engine that dies there. All five invariants hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace.embedded import EmbeddedServer
from millrace.results.transport import Transport
from tests.chaos.checker import ALL
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import HEARTBEAT_S, wait_until
from tests.chaos.workload import Undisturbed, make_jobs
from tests.e2e.engines import EngineProcess
from tests.producer.test_acl import RULES
from tests.results.test_cluster import port_of, start_node

pytestmark = [pytest.mark.slow, TEST_LIMIT]


@contextmanager
def served(place: Place, log: Path, url: str) -> Iterator[EngineProcess]:
    """Start an engine with the command itself and with this URL."""
    before = ("serve",)
    with EngineProcess(log, url, place.queue, module="millrace", before=before, heartbeat_s=HEARTBEAT_S) as engine:
        yield engine.wait_until_serving()


def check_a_life_with(place: Place, url: str, folder: Path) -> str:
    """Use every feature of the server: an engine dies with its jobs; the next one continues them, cancels one, waits for
    one, reads the inbox and drains. Return that engine's log."""
    with served(place, folder / "victim.log", url) as victim:
        ids = place.submit(make_jobs(8, max_tokens=600))
        readers = [place.watch(job_id) for job_id in ids[:2]]
        wait_until(lambda: place.num_tokens_kept() > 8 * 64 and all(reader.num_tokens for reader in readers))
        victim.kill()
    with served(place, folder / "heir.log", url) as heir:
        (cancelled,) = place.submit(make_jobs(1, max_tokens=900, first=50))
        wait_until(lambda: place.states()[cancelled] == "running")
        place.client.cancel(cancelled)
        place.client.submit("3 + 4 =", job_id="late", delay_s=1.0, max_tokens=4, temperature=0.0)
        place.redis.xadd(
            place.client._keys.inbox, {"job": '{"id":"inbox","prompt":"5 + 4 =","max_tokens":4,"temperature":0}'}
        )
        place.wait_all()
        assert place.client.wait("late", 30.0).text == " 7"
        wait_until(lambda: place.record("inbox").get("state") == "finished")
        assert place.client.get("inbox").text == " 9"
        states = {cancelled: place.states()[cancelled]}
        assert heir.terminate() == 0
        place.check(ALL, states=states)
        assert place.client.stats().engines == 0
        return heir.text()


def test_a_cluster(queue_name: str, tmp_path: Path, undisturbed: Undisturbed) -> None:
    with start_node() as server, Place(server, queue_name, tmp_path, undisturbed) as place:
        Transport(place.redis).send(("CLUSTER", "ADDSLOTSRANGE", "0", "16383"))
        wait_until(lambda: place.redis.cluster("INFO")["cluster_state"] == "ok")
        check_a_life_with(place, f"redis+cluster://127.0.0.1:{port_of(place.redis)}", tmp_path)


def test_the_least_rights_of_the_readme(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """No command is refused to an engine that has only the rights from docs/deployment.md."""
    with EmbeddedServer(appendonly=True) as server, Place(server, "default", tmp_path, undisturbed) as place:
        user = "ACL SETUSER engine"
        Transport(place.redis).send((*user.split(), *RULES[user].split()))
        words = check_a_life_with(place, server.url.replace("unix://", "unix://engine:secret@"), tmp_path)
        assert "permi" not in words
        refused = {entry["object"] for entry in place.redis.acl_log()}
        assert refused <= {"client|setinfo"}, "what redis-py says of itself, and does without"
