"""The installed wheel beside a user's files that have the names of our folders: neither side sees the other's modules."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import redis
from rq import Queue
from rq.job import Job

from tests.deploy.conftest import install
from tests.e2e.engines import TINY
from tests.processes import FOLDERS, LIMIT_S, LoggedProcess, wait_until

pytestmark = pytest.mark.packages

QUEUE = "wheel"
RAISES = 'raise RuntimeError(f"{__file__} of the user was imported")\n'
USER_FILES = {
    "worker.py": RAISES,
    "producer.py": RAISES,
    "executor/__init__.py": RAISES,
    "engine_service/__init__.py": RAISES,
    "results.py": 'TABLE = "the user\'s own"\n',
}


class Installed(NamedTuple):
    """An environment with the wheel in it, and a folder with a user's files."""

    environment: Path
    folder: Path

    @property
    def python(self) -> str:
        return str(self.environment / "bin" / "python")

    @property
    def millrace(self) -> str:
        """The console script."""
        return str(self.environment / "bin" / "millrace")

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Run a command in the user's folder and return its output."""
        ran = subprocess.run(
            command, cwd=cwd or self.folder, env=clean(), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    def run_script(self, text: str, *arguments: str) -> str:
        """Run a script that lies beside the user's modules."""
        (script := self.folder / "script.py").write_text(text)
        return self.run(self.python, str(script), *arguments)


def clean(**variables: str) -> dict[str, str]:
    """The environment without the checkout on the path."""
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **variables}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    environment = tmp_path_factory.mktemp("environment")
    installed = Installed(environment, tmp_path_factory.mktemp("user"))
    install(environment, str(wheel))
    for name, text in USER_FILES.items():
        path = installed.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return installed


@pytest.fixture(scope="module")
def service(installed: Installed, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoggedProcess]:
    """An engine that a user starts in that folder, which is on PYTHONPATH too."""
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    with serve(installed, log, [installed.millrace], redis_url, PYTHONPATH=str(installed.folder)) as engine:
        yield engine.wait_for_log("serves")


def serve(
    installed: Installed, log: Path, millrace: list[str], redis_url: str, queue: str = QUEUE, **variables: str
) -> LoggedProcess:
    options = ("--model", str(TINY), "--device", "cpu", "--redis", redis_url, "--queue", queue)
    return LoggedProcess(log, [*millrace, "serve", *options], clean(**variables), installed.folder)


def test_the_wheel_installs_one_name(installed: Installed, tmp_path: Path) -> None:
    script = f"""
from importlib.util import find_spec
import millrace.worker.counter_rng
print([name for name in {sorted(FOLDERS)} if find_spec(name)], millrace.__file__, millrace.worker.__file__)
"""
    found, *files = installed.run(installed.python, "-c", script, cwd=tmp_path).split()
    assert found == "[]"
    assert all(Path(file).is_relative_to(installed.environment) for file in files)


CLIENT = """
import sys
import results
from millrace import Client
with Client(sys.argv[1], queue=sys.argv[2]) as client:
    job = client.wait(client.submit(prompt="3 + 4 =", max_tokens=4, temperature=0.0), 60)
print(job.text.strip(), results.TABLE)
"""


@pytest.mark.usefixtures("service")
def test_a_script_with_a_client(installed: Installed, redis_url: str) -> None:
    assert installed.run_script(CLIENT, redis_url, QUEUE) == "7 the user's own\n"


@pytest.mark.usefixtures("service")
def test_a_job_from_the_shell(installed: Installed, redis_url: str) -> None:
    place = ("--redis", redis_url, "--queue", QUEUE)
    job = ("3 + 4 =", "--max-tokens", "4", "--temperature", "0")
    assert installed.run(installed.millrace, "submit", *place, *job, "--wait").strip() == "7"


@pytest.mark.usefixtures("service")
def test_a_job_through_rq(installed: Installed, redis_url: str, redis_client: redis.Redis, tmp_path: Path) -> None:
    rq_queue = Queue("wheel-rq", connection=redis_client, serializer="json")
    place = ("--redis", redis_url, "--queues", rq_queue.name, "--to-queue", QUEUE)
    environment = clean(PYTHONPATH=str(installed.folder))
    command = [installed.millrace, "gateway", "rq", *place]
    with LoggedProcess(tmp_path / "gateway.log", command, environment, installed.folder):
        job: Job = rq_queue.enqueue("millrace.generate", prompt="3 + 4 =", max_tokens=4, temperature=0.0)
        wait_until(lambda: job.get_status().value == "finished")
    value = job.return_value(refresh=True)
    assert value is not None and value["text"] == " 7"


GUARDED = 'if __name__ == "__main__":\n    main()\n'
OFFLINE = """
import results
from millrace import LLM, SamplingParams

def main():
    with LLM("{model}", device="cpu", executor="{executor}") as llm:
        (output,) = llm.generate("3 + 4 =", SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
    print(output.outputs[0].text.strip(), results.TABLE)

{call}
"""


@pytest.mark.parametrize(
    ("executor", "call"),
    [
        ("uni", GUARDED),
        ("mp", "main()"),
        pytest.param("uni", "main()", marks=pytest.mark.slow),
        pytest.param("mp", GUARDED, marks=pytest.mark.slow),
    ],
    ids=["uni, guarded", "mp", "uni", "mp, guarded"],
)
def test_a_script_with_a_model(installed: Installed, executor: str, call: str) -> None:
    script = OFFLINE.format(model=TINY, executor=executor, call=call)
    assert installed.run_script(script) == "7 the user's own\n"


@pytest.mark.slow
def test_an_engine_that_python_runs_as_a_module(
    installed: Installed, redis_url: str, queue_name: str, tmp_path: Path
) -> None:
    """The working directory is the first place that `python -m` looks at."""
    millrace = [installed.python, "-m", "millrace"]
    with serve(installed, tmp_path / "engine.log", millrace, redis_url, queue_name) as engine:
        engine.wait_for_log("serves")
        assert installed.run_script(CLIENT, redis_url, queue_name) == "7 the user's own\n"
