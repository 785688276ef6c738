"""The documents: links lead somewhere, commands have the options named, generated pages are current, programs run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest

from docs.generate import pages
from millrace.cli import build_parser
from millrace.embedded import EmbeddedServer
from millrace.engine_service.config import make_parser
from tests.e2e.engines import EngineProcess
from tests.processes import LIMIT_S, ROOT, LoggedProcess, checkout_environment, module_command

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
SOURCE = re.compile(r"`([\w/]+/\w+\.(?:py|lua))`")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Yield the name of the document and the text of each block in this language."""
    for document in DOCUMENTS:
        for found, text in BLOCK.findall(document.read_text()):
            if found == language:
                yield document.name, text


def anchors(document: Path) -> set[str]:
    """Return the anchors that a page gets from its headings."""
    headings = HEADING.findall(BLOCK.sub("", document.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings_that_exist(document: Path) -> None:
    for link in LINK.findall(BLOCK.sub("", document.read_text())):
        if link.startswith(("http:", "https:")):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_source_files_that_are_named_exist(document: Path) -> None:
    for name in SOURCE.findall(document.read_text()):
        assert (ROOT / name).exists() or list(ROOT.glob(f"[!.]*/{name}")), name  # or shortened, without the package


def commands() -> list[str]:
    """Return the command lines of shell blocks that call `millrace`, without comments and optional parts."""
    found = []
    for _, text in blocks("sh"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "millrace" in words and words[0] not in ("docker", "pip"):
                found.append(shlex.join(words[words.index("millrace") + 1 :]))
    return sorted(set(found))


@pytest.mark.parametrize("line", commands())
def test_commands_have_the_options_that_they_name(line: str) -> None:
    arguments = shlex.split(line)
    complaint = StringIO()
    with redirect_stderr(complaint):
        try:
            if arguments[0] == "serve":
                make_parser().parse_args(arguments[1:])
            else:
                build_parser().parse_args(arguments)
        except Exception as error:
            complaint.write(str(error))
        except SystemExit:
            pass
    assert complaint.getvalue() == ""


@pytest.mark.parametrize("name", ["cli.md", "python.md"])
def test_generated_pages_are_current(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == pages()[name], "run `make docs`"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An engine with the tiny model and a gateway, on the queue `default`. Yields the environment of its users."""
    folder = tmp_path_factory.mktemp("service")
    with EmbeddedServer() as server:
        gateway = module_command("millrace", "gateway", "rq", "--queues", "generate", "--redis", server.url)
        with (
            EngineProcess(folder / "engine.log", server.url, "default") as engine,
            LoggedProcess(folder / "gateway.log", gateway),
        ):
            engine.wait_until_serving()
            yield {**checkout_environment(), "MILLRACE_REDIS_URL": server.url}


@pytest.mark.parametrize(("document", "program"), list(blocks("python")), ids=lambda value: value[:24])
def test_programs_run(document: str, program: str, service: dict[str, str]) -> None:
    program = program.replace("Redis()", f"Redis.from_url({service['MILLRACE_REDIS_URL']!r})").replace("\n...\n", "\n")
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, **service}, timeout=LIMIT_S, capture_output=True
    )
    assert ran.returncode == 0, ran.stderr.decode()


RUN_ELSEWHERE = {
    "make demo": "tests/millrace/cli/test_demo.py",
    "make test": "all of them",
    "pip install": "tests/deploy/test_wheel.py",
    "torchrun": "tests/e2e/test_ranks.py",
    "source_of": "tests/results/test_protocol_page.py",
}
"""Commands of shell blocks that other tests run."""
SERVERS = {"millrace serve": "serves", "millrace gateway rq": "RQ queues"}
"""Commands that run until they are stopped, and what they log when they are ready."""
REDIS_CLI = f"""#!{sys.executable}
import os, sys, redis
print(redis.Redis.from_url(os.environ["MILLRACE_REDIS_URL"]).execute_command(*sys.argv[1:]))
"""


def shell_blocks() -> list[tuple[str, str]]:
    """Return the shell blocks with the lines that no other test runs."""
    found = []
    for name, text in blocks("sh"):
        lines = [line for line in text.splitlines() if not any(word in line for word in RUN_ELSEWHERE)]
        if "source_of" not in text and any(shlex.split(line, comments=True) for line in lines):
            found.append((name, "\n".join(lines)))
    return found


@pytest.fixture
def shell_folder(tmp_path: Path) -> Path:
    """A folder with the files that the documents name, and a `redis-cli` that uses the test's server."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    body = '{"model": "tiny_model", "prompt": "3 + 4 =", "max_tokens": 4}'
    line = f'{{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {body}}}\n'
    (tmp_path / "in.jsonl").write_text(line)
    (tmp_path / "jobs.jsonl").write_text('{"prompt": "3 + 4 =", "max_tokens": 4}\n')
    (tmp_path / "bin").mkdir()
    (client := tmp_path / "bin" / "redis-cli").write_text(REDIS_CLI)
    client.chmod(0o755)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("document", "block"), shell_blocks(), ids=lambda value: value[:24])
def test_shell_commands_run(document: str, block: str, service: dict[str, str], shell_folder: Path) -> None:
    url, programs = service["MILLRACE_REDIS_URL"], f"{shell_folder}/bin{os.pathsep}{Path(sys.executable).parent}"
    environment = {**os.environ, **service, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    block = block.replace("redis://localhost:6379/0", url).replace("DIR_OR_ID", "examples/tiny_model")
    block = block.replace("millrace run-batch", "rm -f out.jsonl; millrace run-batch")  # one after the other
    for server, ready in SERVERS.items():
        if f"\n{server}" in f"\n{block}":  # not in a comment
            command = ["bash", "-euo", "pipefail", "-c", block.replace(server, f"exec {server}")]
            with LoggedProcess(shell_folder / "log", command, environment, shell_folder) as process:
                process.wait_for_log(ready)
                assert process.terminate() == 0
            return
    command = ["bash", "-euo", "pipefail", "-c", block]
    ran = subprocess.run(command, cwd=shell_folder, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout or ran.stderr
