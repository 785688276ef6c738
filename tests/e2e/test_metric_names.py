"""The names of an engine's metrics follow the rules of Prometheus."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from millrace import Client
from tests.e2e.conftest import Service
from tests.e2e.test_metrics import fetch, run_a_few


def test_names_follow_the_rules_of_prometheus(service: Service, shared_client: Client) -> None:
    engine = service.engine
    run_a_few(shared_client, 1)
    _, page = fetch(engine, "/metrics")
    for family in text_string_to_metric_families(page):
        if family.name.startswith("process_"):
            continue
        assert re.fullmatch(r"millrace_[a-z_]+", family.name)
        assert family.documentation.endswith("."), family
        assert len(re.findall(rf"^# HELP {family.name}(?:_total)? ", page, re.MULTILINE)) == 1
        assert not re.search(r"_(ms|percent|s|kb)$", family.name)
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
        assert family.type in ("counter", "gauge", "histogram", "info"), "quantiles of several engines cannot be merged"
    _, open_metrics = fetch(engine, "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert open_metrics.endswith("# EOF\n")
    assert fetch(engine, "/")[0] == 404
