"""Writes preble.json, the Grafana dashboard of a gateway: `python examples/grafana/make_dashboard.py`. Owns what it
shows.

To use the dashboard, import the file that is there; change this one to change it. Every expression is over the metrics
that docs/gateway.md lists. Counters are shown as rates over `$__rate_interval`, which fits the scrape interval.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent / "preble.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
FLEET = 'job=~"$job",instance=~"$instance"'
WORKER = f'{FLEET},worker=~"$worker"'
MODEL = f'{FLEET},model=~"$model"'

# (legend, expression) of each line; @ stands for the filter on gateways, # for that on workers, too, % on models.
Lines = list[tuple[str, str]]


def rate(metric: str, by: str = "", filtered: str = "@") -> str:
    """Events a second."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{filtered}}}[$__rate_interval]))"


def quantile(share: float, metric: str, by: str = "", filtered: str = "@") -> str:
    """A percentile of a histogram."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{{{filtered}}}[$__rate_interval])))"


def quantiles(metric: str, *shares: float) -> Lines:
    """Percentiles of the chosen models."""
    return [(f"p{int(share * 100)}", quantile(share, metric, filtered="%")) for share in shares]


def share(part: str, whole: str) -> str:
    """One rate as a part of another."""
    return f"{rate(part, filtered='%')} / {rate(whole, filtered='%')}"


HIT_RATE = share("preble_actual_cached_tokens_total", "preble_prompt_tokens_total")
LOADED = f"{rate('preble_worker_loaded_tokens_total')} / {rate('preble_predicted_cached_tokens_total')}"
FAILED = '@,status=~"5..|429"'
ANSWERS = "preble_http_requests_total"
ERRORS = f"({rate(ANSWERS, filtered=FAILED)} or vector(0)) / {rate(ANSWERS)}"
ROWS: list[tuple[str, list[tuple[str, str, str, int, Lines]]]] = [
    (
        "Fleet",
        [
            ("stat", "Workers up", "none", 4, [("", "sum(preble_worker_up{@})")]),
            ("stat", "Requests", "reqps", 4, [("", rate("preble_requests_total"))]),
            ("stat", "Prompt tokens from cache", "percentunit", 4, [("", HIT_RATE)]),
            (
                "stat", "First token, p99", "s", 4,
                [("", quantile(0.99, "preble_time_to_first_token_seconds", filtered="%"))],
            ),
            (
                "stat", "Time per output token, p50", "s", 4,
                [("", quantile(0.5, "preble_time_per_output_token_seconds", filtered="%"))],
            ),
            ("stat", "Answers that are errors", "percentunit", 4, [("", ERRORS)]),
        ],
    ),
    (
        "Requests",
        [
            (
                "timeseries", "Decisions by reason", "reqps", 8,
                [("{{reason}}", rate("preble_requests_total", "reason"))],
            ),
            (
                "timeseries", "HTTP answers by status", "reqps", 8,
                [("{{status}}", rate("preble_http_requests_total", "status"))],
            ),
            (
                "timeseries", "Tokens", "short", 8,
                [
                    ("prompt", rate("preble_prompt_tokens_total", filtered="%")),
                    ("output", rate("preble_output_tokens_total", filtered="%")),
                ],
            ),
            (
                "timeseries", "Requests that name a session", "reqps", 8,
                [("{{names}}", rate("preble_session_requests_total", "names"))],
            ),
            (
                "timeseries", "How generations end", "reqps", 8,
                [
                    (name, rate(f"preble_generations_{name}_total"))
                    for name in ("finished", "failed", "cancelled", "resumed", "queue_full", "refused", "shed")
                ],
            ),
            (
                "timeseries", "Decision time, p99 by phase", "s", 8,
                [("{{phase}}", quantile(0.99, "preble_decision_duration_seconds", "phase"))],
            ),
        ],
    ),
    (
        "Models",
        [
            (
                "timeseries", "Time to first token", "s", 8,
                quantiles("preble_time_to_first_token_seconds", 0.5, 0.9, 0.99),
            ),
            (
                "timeseries", "Time per output token", "s", 8,
                quantiles("preble_time_per_output_token_seconds", 0.5, 0.9, 0.99),
            ),
            (
                "timeseries", "Waiting, p90", "s", 8,
                [("{{at}}", quantile(0.9, "preble_queue_seconds", "at", filtered="%"))],
            ),
            (
                "timeseries", "Prompt tokens of a request", "none", 8,
                quantiles("preble_request_prompt_tokens", 0.5, 0.9, 0.99),
            ),
            (
                "timeseries", "Output tokens of a request", "none", 8,
                quantiles("preble_request_output_tokens", 0.5, 0.9, 0.99),
            ),
            (
                "timeseries", "Output tokens by model", "short", 8,
                [("{{model}}", rate("preble_output_tokens_total", "model", "%"))],
            ),
        ],
    ),
    (
        "Cache",
        [
            (
                "timeseries", "Prompt tokens from cache", "percentunit", 8,
                [
                    ("reported by engines", HIT_RATE),
                    ("estimated", share("preble_predicted_cached_tokens_total", "preble_prompt_tokens_total")),
                    ("best worker", share("preble_best_eligible_cached_tokens_total", "preble_prompt_tokens_total")),
                    ("chosen worker", share("preble_selected_cached_tokens_total", "preble_prompt_tokens_total")),
                ],
            ),
            (
                "timeseries", "Decisions for a worker that had less", "reqps", 8,
                [("", rate("preble_non_max_overlap_selections_total", filtered="%"))],
            ),
            (
                "timeseries", "Regret", "s", 8,
                [(f"p{int(q * 100)}", quantile(q, "preble_regret_seconds")) for q in (0.5, 0.99)],
            ),
            ("timeseries", "Index", "bytes", 8, [("bytes", "sum(preble_index_bytes{@})")]),
            (
                "timeseries", "Nodes of the index, and what leaves it", "short", 8,
                [
                    ("nodes", "sum(preble_index_nodes{@})"),
                    ("{{why}} a second", rate("preble_index_evictions_total", "why")),
                ],
            ),
            (
                "timeseries", "Plans for hot prefixes", "cpm", 8,
                [("{{kind}}", f"60 * {rate('preble_replication_plans_total', 'kind')}")],
            ),
        ],
    ),
    (
        "Workers",
        [
            ("timeseries", "Up", "none", 8, [("{{worker}}", "min by (worker) (preble_worker_up{#})")]),
            (
                "timeseries", "Load in the window", "s", 8,
                [("{{worker}}", "max by (worker) (preble_worker_load_seconds{#})")],
            ),
            ("timeseries", "Live requests", "none", 8, [("{{worker}}", "sum by (worker) (preble_worker_requests{#})")]),
            (
                "timeseries", "Output tokens expected", "short", 8,
                [("{{worker}}", "sum by (worker) (preble_worker_inflight_tokens{#})")],
            ),
            (
                "timeseries", "Estimated cached, of what fits", "percentunit", 8,
                [
                    (
                        "{{worker}}",
                        "(max by (worker) (preble_worker_cached_tokens{#})"
                        " - max by (worker) (preble_worker_away_tokens{#}))"
                        " / max by (worker) (preble_worker_kv_capacity_tokens{#})",
                    )
                ],
            ),
            (
                "timeseries", "Restarts and losses", "ops", 8,
                [
                    (f"{{{{worker}}}} {name}", rate(f"preble_worker_{name}_total", "worker", "#"))
                    for name in ("restarts", "losses")
                ],
            ),
            (
                "timeseries", "Cached in host memory or on disk", "short", 8,
                [("{{worker}}", "max by (worker) (preble_worker_away_tokens{#})")],
            ),
            (
                "timeseries", "Tokens loaded from there", "short", 8,
                [("{{medium}}", rate("preble_worker_loaded_tokens_total", "medium", "#"))],
            ),
            ("timeseries", "Of what is cached, loaded", "percentunit", 8, [("", LOADED)]),
        ],
    ),
    (
        "Discovery",
        [
            (
                "timeseries", "Servers of each source", "none", 8,
                [("{{source}} {{phase}}", "max by (source, phase) (preble_discovery_servers{@})")],
            ),
            (
                "timeseries", "Since a source confirmed them", "s", 8,
                [("{{source}}", "max by (source) (preble_discovery_age_seconds{@})")],
            ),
            (
                "timeseries", "Left out, doubted, not to be asked", "short", 8,
                [
                    ("{{source}} left out", "max by (source) (preble_discovery_left_out{@})"),
                    ("{{source}} doubted", "max by (source) (preble_discovery_doubted{@})"),
                    ("{{source}} failures a second", rate("preble_discovery_failures_total", "source")),
                ],
            ),
        ],
    ),
    (
        "Gateways that report to each other",
        [
            (
                "timeseries", "Others whose reports come, or do not", "none", 8,
                [
                    ("{{instance}} come", "min by (instance) (preble_siblings_connected{@})"),
                    ("{{instance}} do not", "max by (instance) (preble_siblings_silent{@})"),
                ],
            ),
            (
                "timeseries", "Reports, and what went wrong with them", "ops", 8,
                [("{{what}}", rate("preble_sibling_reports_total", "what"))],
            ),
            (
                "timeseries", "Bookings of others", "none", 8,
                [("{{instance}}", "sum by (instance) (preble_leases_of_peers{@})")],
            ),
        ],
    ),
    (
        "Health",
        [
            (
                "timeseries", "Cache events by type", "ops", 8,
                [("{{type}}", rate("preble_kv_events_total", "type", "#"))],
            ),
            (
                "timeseries", "Cache events lost or asked for again", "ops", 8,
                [
                    ("gaps", rate("preble_kv_event_gaps_total", filtered="#")),
                    ("replays", rate("preble_kv_replays_total", filtered="#")),
                    ("resyncs", rate("preble_kv_resyncs_total", filtered="#")),
                ],
            ),
            (
                "timeseries", "Bookings", "none", 8,
                [
                    ("active", "sum(preble_leases_active{@})"),
                    ("live choices", "sum(preble_choices_live{@})"),
                    ("expired a second", rate("preble_lease_expired_total")),
                ],
            ),
        ],
    ),
]  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append({"type": "row", "title": title, "id": len(panels) + 1, "gridPos": place(0, y, WIDTH, 1)})
        y, x, height = y + 1, 0, 4 if row[0][0] == "stat" else 8
        for kind, name, unit, width, lines in row:
            if x + width > WIDTH:
                x, y = 0, y + height
            panels.append(panel(len(panels) + 1, kind, name, unit, lines, place(x, y, width, height)))
            x += width
        y += height
    return {
        "title": "Preble",
        "uid": "preble",
        "description": "The metrics of `preble serve`; docs/gateway.md says what each is.",
        "tags": ["preble", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [source(), *(variable(*one) for one in VARIABLES)]},
        "annotations": {"list": []},
        "panels": panels,
    }


VARIABLES = [
    ("job", "label_values(preble_ready, job)"),
    ("instance", 'label_values(preble_ready{job=~"$job"}, instance)'),
    ("worker", f"label_values(preble_worker_up{{{FLEET}}}, worker)"),
    ("model", f"label_values(preble_output_tokens_total{{{FLEET}}}, model)"),
]


def place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    """Where a panel is, in a grid of 24 columns."""
    return {"x": x, "y": y, "w": width, "h": height}


def panel(number: int, kind: str, title: str, unit: str, lines: Lines, where: dict[str, int]) -> dict[str, Any]:
    """One panel."""
    targets = [
        {
            "refId": chr(ord("A") + i),
            "datasource": SOURCE,
            "expr": expression.replace("{@", "{" + FLEET).replace("{#", "{" + WORKER).replace("{%", "{" + MODEL),
            "legendFormat": legend or "__auto",
        }
        for i, (legend, expression) in enumerate(lines)
    ]
    made = {"type": kind, "title": title, "id": number, "gridPos": where, "datasource": SOURCE, "targets": targets}
    custom = {"fillOpacity": 8, "showPoints": "never"} if kind == "timeseries" else {}
    return made | {
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {},
    }


def source() -> dict[str, Any]:
    """The choice of the Prometheus to ask."""
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def variable(name: str, query: str) -> dict[str, Any]:
    """A choice of some label's values, all of them at first."""
    return {
        "name": name, "type": "query", "datasource": SOURCE, "query": {"query": query, "refId": name}, "refresh": 2,
        "includeAll": True, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}, "sort": 7,
    }  # fmt: skip


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
