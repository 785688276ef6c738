"""docker-compose.yml follows the specification's schema, and our parsers accept every command in it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.cli import build_parser
from millrace.engine_service.config import parse

ROOT = Path(__file__).resolve().parent.parent.parent
COMPOSE_FILE = ROOT / "docker-compose.yml"
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = sorted(name for name, service in SERVICES.items() if service["image"].startswith("millrace:"))
ENGINES = ("engine", "engine-cpu")


def with_defaults(text: str) -> str:
    """Return the text as compose expands `${NAME:-default}` in an empty environment."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def command_of(service: str) -> list[str]:
    return [with_defaults(word) for word in SERVICES[service]["command"]]


def seconds(duration: str) -> float:
    match = re.fullmatch(r"(\d+)(s|m)", duration)
    assert match, duration
    return int(match[1]) * {"s": 1, "m": 60}[match[2]]


def test_it_follows_the_compose_specification() -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE_FILE)]
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


def test_the_gateways_health_check_parses_with_our_own_parser() -> None:
    kind, program, *arguments = SERVICES["gateway"]["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "millrace")
    assert build_parser().parse_args(arguments).queue == "default"


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
    assert all(volume.endswith(":ro") or volume.startswith("huggingface:") for volume in SERVICES[name]["volumes"])


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_may_drain_before_it_is_killed(name: str) -> None:
    config = parse(command_of(name)[1:])
    assert seconds(SERVICES[name]["stop_grace_period"]) >= config.drain_grace + 10


def test_only_the_gpu_engine_reserves_a_gpu() -> None:
    (device,) = SERVICES["engine"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert parse(command_of("engine")[1:]).device == "cuda"
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
