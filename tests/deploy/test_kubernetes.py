"""The Deployment for Kubernetes: our parser accepts its command, and its probe, times and volumes fit the engine."""

from __future__ import annotations

from typing import Any

import yaml

from millrace.engine_service.config import ServeConfig, parse
from tests.deploy.test_compose import HOLD, seconds
from tests.deploy.test_compose import SERVICES as COMPOSE_SERVICES
from tests.processes import ROOT

DEPLOYMENT: dict[str, Any] = yaml.safe_load((ROOT / "deploy/kubernetes.yml").read_text())
POD: dict[str, Any] = DEPLOYMENT["spec"]["template"]["spec"]


def engine() -> dict[str, Any]:
    (container,) = POD["containers"]
    assert isinstance(container, dict)
    return container


def config() -> ServeConfig:
    verb, *options = engine()["args"]
    assert (engine()["command"], verb) == ([HOLD.stem, "millrace"], "serve")
    return parse(options)


def test_an_engine_may_drain_before_it_is_killed() -> None:
    assert POD["terminationGracePeriodSeconds"] >= config().drain_grace + 30
    assert POD["terminationGracePeriodSeconds"] == seconds(COMPOSE_SERVICES["engine"]["stop_grace_period"])


def test_only_the_readiness_probe_asks_for_health() -> None:
    assert not {"livenessProbe", "startupProbe"} & engine().keys()
    (port,) = engine()["ports"]
    assert engine()["readinessProbe"]["httpGet"] == {"path": "/health", "port": port["name"]}
    assert (config().metrics_host, config().metrics_port) == ("0.0.0.0", port["containerPort"])


def test_what_the_engine_writes_to_is_a_volume() -> None:
    assert engine()["securityContext"]["readOnlyRootFilesystem"]
    writable = {mount["mountPath"] for mount in engine()["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/tmp", "/home/millrace/.cache", "/dev/shm"}
    assert config().device_locks.startswith("/tmp/")
    assert {mount["name"] for mount in engine()["volumeMounts"]} == {volume["name"] for volume in POD["volumes"]}
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert "TRITON_CACHE_DIR=/home/millrace/.cache/" in dockerfile
    assert f"--uid {POD['securityContext']['runAsUser']} millrace" in dockerfile


def test_the_pods_have_no_token_for_the_cluster() -> None:
    assert POD["automountServiceAccountToken"] is False


def test_the_pods_belong_to_the_deployment() -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels
    assert engine()["image"] == COMPOSE_SERVICES["engine"]["image"]
