"""What the gateway counts of generations: by model, lengths, times between tokens, waiting; bounds on labels. Time is a
manual clock, workers are plain objects.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from prometheus_client import parser

from preble import GlobalScheduler, ManualClock, SamplingParams
from preble.gateway.core import metrics as module
from preble.gateway.core.metrics import Metrics, Watch
from preble.gateway.core.request_context import RequestContext, note_phase, now_in
from preble.gateway.text.choices import Choice, ChoiceJob, TextPiece

ROUTE = "/v1/completions"


class Stage:
    """One gateway's metrics, and a request on its way."""

    def __init__(self, model: str = "m", choices: int = 1, prompt_tokens: int = 1000) -> None:
        self.clock = ManualClock(100.0)
        self.metrics = Metrics(self.clock)
        self.scheduler = GlobalScheduler(["a"], clock=self.clock)
        self.context = RequestContext("id", self.clock(), model=model)
        prompt = np.arange(prompt_tokens, dtype=np.int32)
        jobs = [ChoiceJob(i, f"id/{i}", prompt, SamplingParams()) for i in range(choices)]
        self.context.progress.choices = [Choice(job) for job in jobs]
        now_in(self.context)
        self.watch: Watch = self.metrics.watch(self.scheduler, jobs, self.context)

    def place(self, *, wait: float = 0.0, cached: int = 0) -> None:
        """The gateway places the choices, after so long."""
        self.clock.advance(wait)
        for choice in self.context.progress.choices:
            choice.decision = self.scheduler.schedule(choice.job.token_ids)
            choice.worker, choice.cached_tokens = choice.decision.worker, cached
        self.metrics.phase("decide", 0.0)

    def tokens(self, seconds: float, count: int, *, last: bool = False, choice: int = 0) -> None:
        """So much later so many tokens come."""
        self.clock.advance(seconds)
        one = self.context.progress.choices[choice]
        one.output_tokens += count
        one.finish_reason = "length" if last else None
        self.watch.saw(TextPiece(one, "", tuple(range(count)), last))
        if self.context.first_token_seconds is None:
            self.context.first_token_seconds = self.watch.first_token_seconds

    def ended(self, status: int = 200) -> dict[str, float]:
        """The request ends; the samples after that, by name and labels."""
        self.metrics.request(ROUTE, status, self.clock() - self.context.started, self.context)
        return samples(self.metrics)


def samples(metrics: Metrics) -> dict[str, float]:
    """What is exported, without the buckets and the process."""
    found = {}
    for family in parser.text_string_to_metric_families(metrics.own_text().decode()):
        for sample in family.samples:
            if sample.name.startswith("preble_") and not sample.name.endswith("_bucket"):
                labels = ",".join(value for _, value in sorted(sample.labels.items()))
                found[f"{sample.name.removeprefix('preble_')}[{labels}]"] = sample.value
    return found


def test_a_generations_times_and_lengths_are_of_its_model() -> None:
    stage = Stage("llama")
    stage.place(wait=0.25)
    prefill = stage.scheduler.prefill_seconds("a", 1000, 400)
    stage.context.progress.choices[0].cached_tokens = 400
    stage.tokens(2.0, 1)
    stage.tokens(0.5, 3)
    stage.tokens(0.7, 2, last=True)
    found = stage.ended()
    expected = {
        "time_to_first_token_seconds_sum[llama]": 2.25,
        "time_per_output_token_seconds_sum[llama]": 1.2 / 5,
        "queue_seconds_sum[gateway,llama]": 0.25,
        "queue_seconds_sum[engine,llama]": 2.0 - prefill,
        "request_prompt_tokens_sum[llama]": 1000,
        "request_output_tokens_sum[llama]": 6,
        "prompt_tokens_total[llama]": 1000,
        "output_tokens_total[llama]": 6,
        "actual_cached_tokens_total[llama]": 400,
        "choices_ended_total[length,llama]": 1,
        f"http_requests_total[llama,{ROUTE},200]": 1,
    }
    assert 0.0 < prefill < 2.0
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert all(found[name.replace("_sum", "_count")] == 1 for name in expected if "_sum" in name)


def test_each_choice_has_its_own_time_between_tokens_and_the_request_one_length() -> None:
    stage = Stage(choices=3)
    stage.place()
    for choice in (0, 1, 2):
        stage.tokens(1.0, 2, choice=choice)
    stage.tokens(1.0, 2, choice=0, last=True)  # 3 s after its first two
    stage.tokens(0.0, 1, choice=1, last=True)  # 2 s
    stage.tokens(0.0, 0, choice=2, last=True)  # no more came
    found = stage.ended()
    assert found["time_per_output_token_seconds_count[m]"] == 2
    assert found["time_per_output_token_seconds_sum[m]"] == pytest.approx(3.0 / 2 + 2.0)
    assert (found["request_output_tokens_count[m]"], found["request_output_tokens_sum[m]"]) == (1, 9)
    assert (found["request_prompt_tokens_sum[m]"], found["prompt_tokens_total[m]"]) == (1000, 3000)
    assert found["time_to_first_token_seconds_count[m]"] == found["queue_seconds_count[engine,m]"] == 1


def test_a_prefill_that_was_quicker_than_the_cost_model_waited_for_nothing() -> None:
    stage = Stage(prompt_tokens=200_000)
    stage.place()
    stage.tokens(1e-6, 1, last=True)
    found = stage.ended()
    assert (found["queue_seconds_count[engine,m]"], found["queue_seconds_sum[engine,m]"]) == (1, 0.0)
    assert found["time_per_output_token_seconds_count[m]"] == 0, "one token has no time between tokens"


def test_a_request_without_a_token_counts_as_a_request_alone() -> None:
    stage = Stage()
    found = stage.ended(429)
    assert found[f"http_requests_total[m,{ROUTE},429]"] == 1
    counted = {name for name, value in found.items() if value and "_count" in name}
    assert counted == {f"http_request_duration_seconds_count[{ROUTE}]", "decision_duration_seconds_count[match]"}


def test_a_request_that_generates_nothing_has_no_model() -> None:
    metrics = Metrics(ManualClock())
    metrics.request("/workers", 200, 0.1, RequestContext("id", 0.0, model="not-asked"))
    found = samples(metrics)
    assert found["http_requests_total[,/workers,200]"] == 1 and not any("not-asked" in name for name in found)


def test_models_are_bounded_and_so_are_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MODEL_LABELS_MAX", 3)
    metrics = Metrics(ManualClock())
    for name in ("a", "b", "x" * 5000, "c", "d", "a", "e" * 5000):
        metrics.of_model(name).output_tokens_total.inc()
    found = {name: value for name, value in samples(metrics).items() if name.startswith("output_tokens_total")}
    tokens = {"a": 2.0, "b": 1.0, "x" * 128: 1.0, "other": 3.0}
    assert found == {f"output_tokens_total[{name}]": value for name, value in tokens.items()}


def test_nothing_says_when_it_was_created() -> None:
    stage = Stage()
    stage.place()
    stage.tokens(0.1, 1, last=True)
    stage.ended()
    text = stage.metrics.own_text().decode()
    assert "_created" not in text and "preble_queue_seconds_bucket" in text and "process_resident_memory" in text


# --- phases -----------------------------------------------------------------------------------------------------------


def test_phases_of_a_request_reach_from_the_first_beginning_to_the_last_end() -> None:
    context = RequestContext("id", 0.0)
    now_in(context)
    note_phase("decide", 1.0, 5.0)
    note_phase("decide", 0.5, 9.0)
    note_phase("tokenize", 2.0, 4.0)
    spans = {name: (phase.began, phase.ended) for name, phase in context.phases.items()}
    assert spans == {"decide": (4.0, 9.0), "tokenize": (2.0, 4.0)}


def test_outside_of_requests_phases_are_counted_only() -> None:
    now_in(None)
    metrics = Metrics(ManualClock())
    metrics.phase("decide", 0.5)
    assert samples(metrics)["decision_duration_seconds_sum[decide]"] == 0.5


@pytest.mark.parametrize(("worker", "cached"), [("nobody", 0), ("a", 1000), ("a", 5000)])
def test_no_prefill_is_no_time(worker: str, cached: int) -> None:
    scheduler = GlobalScheduler(["a"])
    least = scheduler.prefill_seconds("a", 1000, 999)
    found: Any = scheduler.prefill_seconds(worker, 1000, cached)
    assert 0.0 <= found <= least
