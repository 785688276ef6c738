"""The names of an engine's metrics follow the rules of Prometheus, and those in `deploy/` and docs/monitoring.md exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from itertools import chain

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from millrace import Client
from tests.e2e.conftest import Service
from tests.e2e.engines import wait_until
from tests.e2e.test_metrics import fetch, run_a_few
from tests.processes import LIMIT_S, ROOT

PROMTOOL = os.environ.get("MILLRACE_PROMTOOL") or shutil.which("promtool")


def test_names_follow_the_rules_of_prometheus(service: Service, shared_client: Client) -> None:
    engine = service.engine
    run_a_few(shared_client, 1)
    _, page = fetch(engine, "/metrics")
    for family in text_string_to_metric_families(page):
        if family.name.startswith("process_"):
            continue
        assert re.fullmatch(r"millrace_[a-z0-9_]+", family.name)
        assert family.documentation.endswith("."), family
        assert len(re.findall(rf"^# HELP {family.name}(?:_total)? ", page, re.MULTILINE)) == 1
        assert not re.search(r"_(ms|percent|s|kb)$", family.name)
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
        assert family.type in ("counter", "gauge", "histogram", "info"), "quantiles of several engines cannot be merged"
    _, open_metrics = fetch(engine, "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert open_metrics.endswith("# EOF\n")
    assert fetch(engine, "/")[0] == 404


def test_alerts_and_dashboard_are_valid_and_use_what_an_engine_has(service: Service, shared_client: Client) -> None:
    wait_until(lambda: "millrace_queue_ready_jobs" in fetch(service.engine, "/metrics")[1])
    _, page = fetch(service.engine, "/metrics")
    families = list(text_string_to_metric_families(page))
    names = {family.name for family in families} | {each.name for family in families for each in family.samples}
    groups = yaml.safe_load((ROOT / "deploy/alerts.yml").read_text())["groups"]
    panels = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())["panels"]
    expressions = [rule["expr"] for group in groups for rule in group["rules"]]
    shown = [one["expr"] for one in chain(*(each["targets"] for each in panels))]
    assert all('{queue=~"$queue"}' in expression for expression in shown)
    expressions += [expression.replace("$__rate_interval", "5m") for expression in shown]
    for expression in expressions:
        promql_parser.parse(expression)
        assert set(re.findall(r"millrace_\w+", expression)) <= names, expression
    text = (ROOT / "docs/monitoring.md").read_text()
    optional = {"millrace_queue_", "millrace_device_utilization_ratio"}
    assert set(re.findall(r"millrace_\w+", text)) - optional <= names
    assert {rule["alert"] for group in groups for rule in group["rules"]} <= set(re.findall(r"Millrace\w+", text))


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool on PATH or in MILLRACE_PROMTOOL")
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "deploy/prometheus.yml"),
        ("check", "rules", "deploy/alerts.yml"),
        ("test", "rules", "tests/e2e/alerts_test.yml"),
        ("check", "metrics"),
    ],
    ids=" ".join,
)
def test_promtool_finds_nothing(arguments: tuple[str, ...], service: Service) -> None:
    assert PROMTOOL is not None
    _, page = fetch(service.engine, "/metrics")
    ran = subprocess.run([PROMTOOL, *arguments], cwd=ROOT, input=page, capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0 and not ran.stderr, ran.stdout + ran.stderr
