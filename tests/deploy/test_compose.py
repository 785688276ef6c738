"""The compose files follow the specification's schema, and our parsers accept every command in them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.cli import build_parser
from millrace.engine_service.config import parse
from tests.processes import LIMIT_S, ROOT, LoggedProcess, children_of, wait_until

COMPOSE_FILE = ROOT / "docker-compose.yml"
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = sorted(name for name, service in SERVICES.items() if service["image"].startswith("millrace:"))
ENGINES = ("engine", "engine-cpu")
SECRETS_FILE = ROOT / "deploy" / "secrets.yml"
SECRETS: dict[str, Any] = yaml.safe_load(SECRETS_FILE.read_text())
HOLD = ROOT / "deploy" / "hold-if-invalid.sh"


def with_defaults(text: str) -> str:
    """Return the text as compose expands `${NAME:-default}` in an empty environment."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def command_of(service: str) -> list[str]:
    return [with_defaults(word) for word in SERVICES[service]["command"]]


def seconds(duration: str) -> float:
    match = re.fullmatch(r"(\d+)(s|m)", duration)
    assert match, duration
    return int(match[1]) * {"s": 1, "m": 60}[match[2]]


def test_they_follow_the_compose_specification() -> None:
    files = (str(COMPOSE_FILE), str(SECRETS_FILE))
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *files]
    ran = subprocess.run(check, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_expected_services_stand_there() -> None:
    assert set(SERVICES) == {"redis", "engine", "engine-cpu", "gateway"}
    assert SERVICES["engine-cpu"]["profiles"] == ["cpu"]
    assert SERVICES["gateway"]["profiles"] == ["gateway"]


@pytest.mark.parametrize("name", OURS)
def test_every_command_parses_with_our_own_parser(name: str) -> None:
    verb, *arguments = command_of(name)
    if verb == "serve":
        assert parse(arguments).queue == "default"
    else:
        assert build_parser().parse_args([verb, *arguments]).run


def test_the_gateways_health_check_asks_for_that_gateway() -> None:
    kind, program, *arguments = SERVICES["gateway"]["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "millrace")
    assert arguments == [*command_of("gateway"), "--check"]
    assert build_parser().parse_args(arguments).check


@pytest.mark.parametrize("name", ENGINES)
def test_an_engines_health_check_asks_that_engine(name: str) -> None:
    config = parse(command_of(name)[1:])
    assert config.metrics_host == "0.0.0.0", "for a Prometheus in another container"
    assert f"http://127.0.0.1:{config.metrics_port}/health" in SERVICES[name]["healthcheck"]["test"][-1]


@pytest.mark.parametrize("name", OURS)
def test_ours_start_after_redis_is_healthy_and_know_where_it_is(name: str) -> None:
    service = SERVICES[name]
    assert service["depends_on"]["redis"]["condition"] == "service_healthy"
    assert service["environment"]["MILLRACE_REDIS_URL"] == "redis://redis:6379/0"


@pytest.mark.parametrize("name", ENGINES)
def test_nothing_keeps_an_engine_from_being_scaled(name: str) -> None:
    assert not {"container_name", "hostname", "ports", "network_mode"} & SERVICES[name].keys()
    shared = ("huggingface:", "device-locks:", "triton:")  # all three are written in an atomic way
    assert all(volume.endswith(":ro") or volume.startswith(shared) for volume in SERVICES[name]["volumes"])


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_may_drain_before_it_is_killed(name: str) -> None:
    config = parse(command_of(name)[1:])
    assert seconds(SERVICES[name]["stop_grace_period"]) >= config.drain_grace + 30


def test_the_gpu_engine_sees_all_gpus_and_takes_a_free_one() -> None:
    (device,) = SERVICES["engine"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["count"] == "all"
    assert {"gpu", "utility"} <= set(device["capabilities"]), "utility has nvidia-smi"
    config = parse(command_of("engine")[1:])
    assert config.device == "auto"
    assert f"device-locks:{config.device_locks}" in SERVICES["engine"]["volumes"], "replicas share the locks"
    assert "device-locks" in COMPOSE["volumes"]
    assert f"1777 {config.device_locks}" in (ROOT / "Dockerfile").read_text(), "the volume takes the folder's rights"
    assert SERVICES["engine"]["shm_size"] == "2gb"
    assert "deploy" not in SERVICES["engine-cpu"]
    assert parse(command_of("engine-cpu")[1:]).device == "cpu"


def test_the_cpu_engine_serves_the_model_of_the_checkout() -> None:
    source = with_defaults(SERVICES["engine-cpu"]["volumes"][0]).partition(":")[0]
    model = Path(parse(command_of("engine-cpu")[1:]).model)
    assert (ROOT / source / model.relative_to("/models") / "config.json").exists()


def test_redis_is_reachable_from_this_host_only_and_keeps_its_data() -> None:
    redis = SERVICES["redis"]
    assert [with_defaults(port) for port in redis["ports"]] == ["127.0.0.1:6379:6379"]
    assert redis["volumes"] == ["redis-data:/data"]
    assert "healthcheck" in redis


def test_services_without_a_gpu_share_an_image_without_cuda() -> None:
    for service in (SERVICES["engine-cpu"], SERVICES["gateway"]):
        assert service["build"]["args"] == {"TORCH_INDEX": "https://download.pytorch.org/whl/cpu"}
        assert service["image"] == "millrace:0.1.0-cpu"
    assert SERVICES["engine"]["image"] == "millrace:0.1.0"
    assert "args" not in SERVICES["engine"]["build"]


def hold(folder: Path, program: str) -> LoggedProcess:
    """Run a shell program as the entry point of our services runs `millrace`."""
    (file := folder / "millrace").write_text(f"#!/bin/sh\n{program}\n")
    file.chmod(0o755)
    name, *words = SERVICES["engine"]["entrypoint"]
    assert name == HOLD.stem
    return LoggedProcess(folder / "log", [str(HOLD), *words], {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"})


@pytest.mark.parametrize("status", [0, 1, 4, 8])
def test_a_container_ends_as_its_command_does(status: int, tmp_path: Path) -> None:
    with hold(tmp_path, f"exit {status}") as container:
        assert container.process.wait(LIMIT_S) == status


def test_a_container_whose_command_is_invalid_waits_instead_of_being_restarted(tmp_path: Path) -> None:
    assert all(SERVICES[name]["restart"] == "unless-stopped" for name in OURS)
    with hold(tmp_path, "echo model: is missing; exit 2") as container:
        container.wait_for_log(
            "model: is missing\nexit status 2: this container waits to be stopped; correct its command"
        )
        wait_until(lambda: children_of(container.process.pid), what="its `sleep`")
        (sleeping,) = children_of(container.process.pid)
        assert container.terminate() == 2, (
            "by a handler: the first process of a container is not ended by the signal itself"
        )
        wait_until(lambda: not Path(f"/proc/{sleeping}").exists())


def test_a_container_that_is_stopped_lets_its_command_drain(tmp_path: Path) -> None:
    program = "trap 'echo draining; sleep 0.2; exit 4' TERM; echo up; while :; do sleep 0.05; done"
    with hold(tmp_path, program) as container:
        container.wait_for_log("up")
        assert container.terminate() == 4
        assert "draining" in container.text()


def test_secrets_come_from_files_and_every_service_reads_its_own() -> None:
    def files(service: str) -> set[str]:
        environment = SECRETS["services"][service]["environment"]
        return {value.removeprefix("/run/secrets/") for value in environment.values() if value}

    assert SECRETS["services"].keys() == SERVICES.keys()
    for name in OURS:
        service = SECRETS["services"][name]
        assert files(name) == set(service["secrets"]) <= SECRETS["secrets"].keys()
        assert service["environment"]["MILLRACE_REDIS_URL"] == "", "else it would come first"
    assert "requirepass" in SECRETS["services"]["redis"]["command"][-1]
    before = " ".join(command_of("redis")[1:])
    assert f"valkey-server {before} --requirepass" in SECRETS["services"]["redis"]["command"][-1]
