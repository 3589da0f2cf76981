"""The Grafana dashboard and the alerts against the metrics that are exported: names, labels, and that they can be read.
Runs neither Grafana nor Prometheus."""

from __future__ import annotations

import json
import re
import runpy
from typing import Any

import msgspec
import numpy as np
import pytest

from preble import GlobalScheduler, ManualClock, SamplingParams
from preble.gateway.core.metrics import Metrics
from preble.gateway.core.request_context import RequestContext
from preble.gateway.core.sibling_processes import merged
from preble.gateway.text.choices import Choice, ChoiceJob
from preble.types import SessionHint
from tests.support.paths import ROOT

parser = pytest.importorskip(
    "prometheus_client.parser", reason="needs prometheus_client: pip install 'preble[gateway]'"
)

FOLDER = ROOT / "examples" / "grafana"
SCRAPED = {"job", "instance", "le"}  # what Prometheus adds
# A word that an expression has outside of quotes, and that is no name of a metric or of a label.
PROMQL = {"sum", "min", "max", "by", "rate", "histogram_quantile", "label_values", "or", "vector"}
PROMQL |= {"absent", "increase", "offset", "and", "on"}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    """The file."""
    return dict(json.loads((FOLDER / "preble.json").read_text()))


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Labels by metric, of a gateway where everything has happened once."""
    metrics = Metrics(ManualClock())
    context = RequestContext("id", 0.0, session=SessionHint("talk"))
    context.progress.choices = [Choice(ChoiceJob(0, "id", np.arange(3, dtype=np.int32), SamplingParams()))]
    metrics.request("/v1/completions", 200, 0.1, context)
    metrics.phase("decide", 1e-5)
    metrics.of_model("m").choice_ended("stop")
    scheduler = GlobalScheduler(["a"])
    scheduler.finish(scheduler.schedule([1, 2, 3]).request_id)
    names = ("finished", "failed", "cancelled", "resumed", "queue_full", "refused", "shed", "live_requests")
    worker = {"worker_id": "a", "state": "ready", "epoch": 1, "events": {"BlockStored": 2}}
    stats = scheduler.stats()
    stats["plans"]["made"] = {"replica": 1}
    scheduler.stats = lambda: stats
    router = {**dict.fromkeys(names, 0), "siblings": {}, "workers": {"tcp://a": worker}}
    text = metrics.render(scheduler, router, GATEWAY)
    text = merged({0: text}).decode()  # as several processes show it
    found: dict[str, set[str]] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


SOURCE = {"source": "file:x", "servers": {"serving": 1}, "age_seconds": 1.0, "is_doubted": False, "left_out": 0}
GATEWAY = {"live_choices": 0, "tasks": 1, "ready": True, "discovery": [{**SOURCE, "failures": 0}]}


def expressions(dashboard: dict[str, Any]) -> list[str]:
    """Everything that Prometheus is asked."""
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries = [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    return [target["expr"] for target in targets] + queries


def words(expression: str) -> set[str]:
    """Names in an expression, without what is quoted."""
    plain = re.sub(r'"[^"]*"|\[[^]]*\]|\b\d[\w.]*', "", expression)
    return set(re.findall(r"[a-z_][a-z0-9_]*", plain)) - PROMQL


def test_every_metric_and_label_of_the_dashboard_is_exported(
    dashboard: dict[str, Any], exported: dict[str, set[str]]
) -> None:
    asked = expressions(dashboard)
    assert len(asked) > 30
    for expression in asked:
        names = {word for word in words(expression) if word.startswith("preble_")}
        assert names and names <= exported.keys(), f"{names - exported.keys()} in {expression}"
        labels = words(expression) - names
        for name in names:
            assert labels <= exported[name] | SCRAPED, f"{labels - exported[name]} in {expression}"


# --- alerts -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    """Every rule of alerts.yaml."""
    groups = msgspec.yaml.decode((FOLDER / "alerts.yaml").read_bytes())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_metric_and_label_of_an_alert_is_exported(
    rules: list[dict[str, Any]], exported: dict[str, set[str]]
) -> None:
    assert len(rules) >= 15 and len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        expression = rule["expr"]
        names = {word for word in words(expression) if word.startswith(("preble_", "process_"))}
        assert names and names <= exported.keys(), f"{names - exported.keys()} in {rule['alert']}"
        shared = set.union(*(exported[name] for name in names)) | SCRAPED
        assert words(expression) - names <= shared, f"{words(expression) - names - shared} in {rule['alert']}"
        assert all(expression.count(a) == expression.count(b) for a, b in ("()", "{}", "[]")), expression


def test_prometheus_can_read_the_alerts(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"Preble[A-Za-z]+", rule["alert"]) and re.fullmatch(r"\d+[mh]", rule.get("for", "1m"))
        assert rule["labels"].keys() == {"severity"} and rule["labels"]["severity"] in {"page", "ticket"}
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        kept = re.search(r"by \(([\w, ]+)\)", rule["expr"])
        assert named <= (SCRAPED | {"process"} if kept is None else set(kept[1].split(", "))), rule["alert"]


def test_every_expression_is_promql(rules: list[dict[str, Any]], dashboard: dict[str, Any]) -> None:
    """Grammar, functions and types, as Prometheus checks them when it reads a rule."""
    promql = pytest.importorskip("promql_parser", reason="needs promql-parser: pip install 'preble[test]'")
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    asked = [*(rule["expr"] for rule in rules), *(re.sub(r"\[\$\w+\]", "[5m]", one) for one in panels)]
    for expression in asked:
        promql.parse(expression)
    for wrong in ("rate(preble_ready)", "sum by (job preble_ready", 'preble_ready > "1"', "rates(preble_ready[5m])"):
        with pytest.raises(ValueError):
            promql.parse(wrong)


def test_alerts_of_labels_name_values_that_exist(rules: list[dict[str, Any]]) -> None:
    quoted = {pair for rule in rules for pair in re.findall(r'(\w+)=~?"([^"]*)"', rule["expr"])}
    assert quoted == {("status", "5.."), ("status", "429"), ("at", "engine")}


# --- what both are of -------------------------------------------------------------------------------------------------


def test_what_peers_export_is_exported(exported: dict[str, set[str]]) -> None:
    wanted = {
        "preble_requests_total": {"policy", "reason"},
        "preble_http_requests_total": {"route", "status", "model"},
        "preble_time_per_output_token_seconds_count": {"model"},
        "preble_queue_seconds_count": {"model", "at"},
        "preble_request_prompt_tokens_count": {"model"},
        "preble_request_output_tokens_count": {"model"},
        "preble_decision_duration_seconds_count": {"phase"},
        "preble_kv_events_total": {"type", "worker"},
        "preble_kv_event_gaps_total": {"worker"},
        "preble_worker_epoch": {"worker"},
        "preble_replication_plans_total": {"kind"},
        "preble_index_evictions_total": {"why"},
        "preble_regret_seconds_count": set(),
        "preble_leases_active": set(),
        "preble_scaling_desired_workers": set(),
    }
    assert {name: exported.get(name, set()) - {"process"} for name in wanted} == wanted


def test_grafana_can_read_it(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert dashboard["schemaVersion"] >= 36 and dashboard["title"] and dashboard["uid"]
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    for expression in expressions(dashboard):
        assert set(re.findall(r"\$(?!__)(\w+)", expression)) <= names
        assert all(expression.count(a) == expression.count(b) for a, b in ("()", "{}", "[]")), expression
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)), "no panel lies on another"
    assert max(x for x, _ in cells) < 24


def test_the_file_is_what_its_program_writes() -> None:
    made = runpy.run_path(str(FOLDER / "make_dashboard.py"))["text"]()
    assert made == (FOLDER / "preble.json").read_text(), "run python examples/grafana/make_dashboard.py"


def test_the_metrics_are_documented(exported: dict[str, set[str]]) -> None:
    text = (ROOT / "docs" / "gateway.md").read_text()
    for name in ("preble_decision_duration_seconds", "preble_kv_events_total", "preble_queue_seconds"):
        assert f"`{name}`" in text
