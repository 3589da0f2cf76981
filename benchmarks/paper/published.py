"""The numbers the paper's authors published or left in their notebooks, as data to lay beside our figures.

Owns the numbers and where they come from; draws nothing and judges nothing. Figures 7 to 10 of the paper exist as
pictures only. The curves here were read off pictures of development runs of the same code base on the same grids of
rates (notebooks of the authors' repository, April and May 2024); commits and cells are named in `source`. They are
two-GPU and four-GPU runs on A6000 with Mistral-7B; of H100 no figure is kept. "~" before a value means that its marker
lay under another line, whose value it is; "-" that there is no point.

Latency and TTFT are in seconds; normalised latency is request latency by output tokens, in seconds a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

METRICS = {
    "mean_latency": "s",
    "p50_latency": "s",
    "p90_latency": "s",
    "p99_latency": "s",
    "mean_normalised": "s/token",
    "p50_normalised": "s/token",
    "p90_normalised": "s/token",
    "p99_normalised": "s/token",
    "mean_ttft": "s",
    "p50_ttft": "s",
    "p99_ttft": "s",
    "mean_tpot": "s/token",
    "p50_tpot": "s/token",
}
# "round_robin" ran SGLang's longest-prefix order without chunked prefill, "preble" its own local scheduler with chunks
# of 512; "preble_lpm" is Preble's global scheduler over SGLang's local one.
POLICIES = ("preble", "preble_lpm", "oracle", "round_robin")
DIGITISED, PRINTED = "digitised", "printed"
UNKNOWN_SCALE = "1.5 % of the axis, whose length is not recorded"


@dataclass(frozen=True, slots=True)
class Point:
    """One value at a rate. `hidden`: its marker lay under another line, so the value is that line's."""

    rps: float
    value: float
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of one panel, in order of rate.

    `gpus` in total; `kind` is "digitised" or "printed" (exact); `error` is the reading error in the unit of the metric,
    None where it was not determined, then `error_note` may say more; `simulated`: from the authors' simulator, not
    from GPUs.
    """

    figure: str
    workload: str
    gpus: int
    policy: str
    metric: str
    points: tuple[Point, ...]
    kind: str
    error: float | None
    source: str
    error_note: str = ""
    simulated: bool = False

    @property
    def rps(self) -> tuple[float, ...]:
        """Requests a second, over all GPUs."""
        return tuple(point.rps for point in self.points)

    @property
    def values(self) -> tuple[float, ...]:
        """The metric at each rate."""
        return tuple(point.value for point in self.points)

    def at(self, rps: float) -> float | None:
        """The value at a rate, None where there is no point."""
        return next((point.value for point in self.points if point.rps == rps), None)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio the paper states: the baseline's `metric` over Preble's is from `low` to `high`."""

    workload: str
    baseline: str
    metric: str
    low: float
    high: float
    source: str = "paper text"


@dataclass(frozen=True, slots=True)
class Iteration:
    """Seconds of one iteration with a single chunk of `new_tokens` that ends at `context_tokens`."""

    new_tokens: int
    context_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture as it was read: one value for each rate in `lines` of "metric policy value/value/..."."""

    workload: str
    gpus: int
    source: str
    rps: str
    lines: str
    errors: dict[str, float]
    error_note: str = ""
    simulated: bool = False
    kind: str = DIGITISED
    figure: str = "7"

    def curves(self) -> Iterator[Curve]:
        """Its lines, one by one. Raises ValueError for a line that is not in this format."""
        rates = [float(rate) for rate in self.rps.split("/")]
        for line in self.lines.strip().splitlines():
            metric, policy, values = line.split()
            texts = values.split("/")
            if metric not in METRICS or policy not in POLICIES or len(texts) != len(rates):
                raise ValueError(f"{self.workload} on {self.gpus} GPUs: cannot read {line!r}")
            points = tuple(
                Point(rate, float(text.lstrip("~")), text.startswith("~"))
                for rate, text in zip(rates, texts, strict=True)
                if text != "-"
            )
            error = 0.0 if self.kind == PRINTED else self.errors.get(metric)
            note = "" if error is not None else self.error_note
            yield Curve(
                self.figure, self.workload, self.gpus, policy, metric, points, self.kind, error, self.source, note,
                self.simulated,
            )  # fmt: skip


PANELS = (
    Panel(
        "video_qa", 2, "e2e.ipynb at af6b529, cell 7; GPUs",
        "0.5/1/2/3/4/5/6/7",
        """
        mean_latency preble      ~1.1/1.3/2.6/3.5/8.1/11.8/12.8/15.9
        mean_latency oracle      ~1.1/1.9/14.2/23.8/30.6/32.5/35.6/36.5
        mean_latency round_robin 1.0/1.6/8.3/33.8/45.8/49.6/54.2/57.3
        p99_latency  preble      4.3/5.0/14.3/14.3/27.9/30.0/37.9/52.9
        p99_latency  oracle      ~4/~11/60.5/63.4/70.5/76/85.5/89
        p99_latency  round_robin 5.0/10.1/47/75.7/102/102/128/134
        """,
        {"mean_latency": 0.3, "p99_latency": 0.7},
    ),
    Panel(
        "document_qa", 2, "e2e.ipynb at af6b529, cells 8 and 9; GPUs; LooGLE, 45 output tokens",
        "0.1/0.2/0.3/0.5/0.7/0.8/0.9/1.0",
        """
        mean_latency   preble      6.2/7.3/8.8/14.4/27.2/35.6/54.6/63.3
        mean_latency   oracle      4.0/6.0/9.3/30.9/42.5/37.2/54.1/45.0
        mean_latency   round_robin 5.1/7.4/14.1/46.5/67.8/67.6/85.4/83.4
        p99_normalised preble      ~.3/.5/.46/.78/1.10/1.61/2.58/3.74
        p99_normalised oracle      .28/.45/.75/2.16/4.74/3.5/8.7/5.5
        p99_normalised round_robin .28/.70/.95/5.75/11.5/11.7/12.0/13.6
        p50_normalised preble      .12/.13/.19/.30/.59/.74/1.06/1.24
        p50_normalised oracle      .04/.11/.14/.68/.77/.69/.86/.78
        p50_normalised round_robin .11/.13/.26/.85/.99/.87/1.29/1.32
        """,
        {"mean_latency": 0.3},
    ),
    Panel(
        "document_qa", 4, "e2e.ipynb at af6b529, cells 8 and 9; GPUs; LooGLE, 45 output tokens",
        "0.2/0.4/0.6/1.0/1.4/1.6/1.8",
        """
        mean_latency   preble      6.6/7.5/7.9/14.9/24.4/28.5/50.5
        mean_latency   oracle      3.9/5.1/8.6/16.8/30.8/31.8/37.8
        mean_latency   round_robin 5.1/6.5/10/50.5/77.1/88.5/101.4
        p99_normalised preble      .47/.49/.49/.80/1.37/1.46/2.49
        p99_normalised oracle      .37/.57/.93/1.06/2.22/2.09/3.44
        p99_normalised round_robin .20/.49/.90/5.62/12.0/11.2/14.2
        p50_normalised preble      .13/.14/~.16/.31/.53/.60/1.04
        p50_normalised oracle      .07/.09/.11/.35/.61/.64/.73
        p50_normalised round_robin .11/.12/.16/.95/1.37/1.68/1.80
        """,
        {"mean_latency": 0.3},
    ),
    Panel(
        "document_qa", 4, "e2e.ipynb at af6b529, cell 10; the authors' simulator; LooGLE, 45 output tokens",
        "0.6/1.0/1.4",
        """
        mean_latency   preble      5.5/8.0/16.9
        mean_latency   oracle      7.4/18.0/28.5
        mean_latency   round_robin 8.7/46.7/71.2
        p99_normalised preble      .38/.54/.85
        p99_normalised oracle      .8/1.69/4.6
        p99_normalised round_robin .73/4.66/11.4
        """,
        {"mean_latency": 0.3},
        simulated=True,
    ),
    Panel(
        "tool_use", 2, "e2e.ipynb at af6b529, cell 6; GPUs; ToolBench, 200 tools, even",
        "3/6/9/12/15/18",
        """
        p50_normalised preble      .05/.08/.21/.32/.52/1.03
        p50_normalised round_robin .05/.09/.82/1.13/1.30/1.84
        p90_normalised preble      ~.07/.12/.38/1.66/2.52/3.79
        p90_normalised round_robin .06/.14/1.20/3.46/5.47/6.87
        p99_normalised preble      ~.1/.3/.60/3.26/4.75/6.44
        p99_normalised round_robin .08/.21/1.70/5.79/9.10/10.9
        p50_ttft       preble      .3/.5/1.8/5.3/14.8/35
        p50_ttft       round_robin .25/.3/7/18/24/42
        p99_ttft       preble      ~1/2/15/89/141/188
        p99_ttft       round_robin .4/1/32/162/257/312
        p50_tpot       preble      .05/.07/.14/.16/.16/.16
        p50_tpot       round_robin .04/.09/.68/.68/.70/.74
        """,
        {}, UNKNOWN_SCALE,
    ),
    Panel(
        "tool_use", 4, "notebook at 0ca498, cell 11; GPUs; ToolBench, even",
        "6/12/18/24/30/36",
        """
        mean_latency   preble      ~2.2/4.5/18.8/38/64.5/123
        mean_latency   round_robin 2.2/7/46/86/118/164
        mean_ttft      preble      .5/.8/12/31/57/116
        mean_ttft      round_robin .7/.7/17.5/57/89/133
        p99_normalised preble      ~.1/.3/2.0/3.9/5.1/9.8
        p99_normalised round_robin .1/.48/2.5/6.9/10.1/13.8
        p99_ttft       preble      ~1/3/59/113/147/267
        p99_ttft       round_robin 1/1/53/179/276/375
        """,
        {"mean_latency": 1.0, "mean_ttft": 1.0, "p99_ttft": 1.0},
    ),
    Panel(
        "tool_use", 4, "notebook at 0ca498, its text; GPUs; ToolBench, even",
        "36",
        "mean_normalised preble 2.68",
        {}, kind=PRINTED,
    ),
    Panel(
        "programming", 2, "branch VE_H100, notebook at d54f99, cells 18 and 19; GPUs",
        "1/2/2.5/3/3.5/4",
        """
        mean_normalised preble      .07/.16/.39/.68/.56/.89
        mean_normalised round_robin .06/.25/.46/.76/.92/1.15
        p99_normalised  preble      ~.11/.45/1.52/3.24/2.82/4.23
        p99_normalised  round_robin .11/.96/3.36/5.92/7.01/8.65
        """,
        {},
    ),
    Panel(
        "programming", 4, "branch VE_H100, notebook at d54f99, cells 18 and 19; GPUs",
        "2/4/5/6/7/8",
        """
        mean_normalised preble      .07/.14/.24/.47/.69/.96
        mean_normalised round_robin .06/.20/.43/.72/1.05/1.43
        p99_normalised  preble      .12/.30/.74/1.88/3.32/5.02
        p99_normalised  round_robin .09/.44/3.23/5.11/6.98/9.42
        """,
        {},
    ),
    Panel(
        "programming", 2,
        "exploration_e2e.ipynb, cell 4, printed; the authors' simulator; programming_8.csv, 100 patterns, 2344 "
        "finished, at most 512 output tokens",
        "0.5/1/2/2.5/3",
        """
        p50_latency preble      7.16/8.95/20.85/49.50/94.35
        p50_latency preble_lpm  -/-/21.77/-/-
        p50_latency round_robin 7.03/9.08/37.55/55.10/66.32
        p90_latency preble      16.99/21.19/47.25/92.58/159.45
        p90_latency preble_lpm  -/-/49.88/-/-
        p90_latency round_robin 17.18/22.14/90.55/148.71/351.75
        p99_latency preble      21.16/29.87/70.18/122.74/199.97
        p99_latency preble_lpm  -/-/73.13/-/-
        p99_latency round_robin 21.41/31.88/140.87/672.28/815.37
        mean_ttft   preble      0.44/0.59/2.89/18.62/51.58
        mean_ttft   preble_lpm  -/-/2.38/-/-
        mean_ttft   round_robin 0.45/0.52/6.56/39.24/81.45
        mean_tpot   preble      .0369/.0468/.1018/.1665/.2287
        mean_tpot   preble_lpm  -/-/.1105/-/-
        mean_tpot   round_robin .0364/.0475/.1792/.2094/.2218
        """,
        {}, simulated=True, kind=PRINTED,
    ),
    Panel(
        "video_qa", 4, "branch VE_H100, notebook at d54f99, cell 17; its title says simulation, its files GPUs",
        "1/2/4/6/8/10",
        """
        mean_normalised preble      ~.3/.34/.55/.97/2.0/-
        mean_normalised oracle      .3/.3/2.35/6.4/8.3/-
        mean_normalised round_robin .34/.42/4.0/13.1/18.3/21.5
        p99_normalised  preble      ~1/1.5/3.1/5.5/9.9/-
        p99_normalised  oracle      1.8/2/10.5/14.4/21.1/-
        p99_normalised  round_robin 1.0/1.5/11.1/34/49/61
        """,
        {},
    ),
    Panel(
        "embodied_agent", 2, "branch VE_H100, notebook at d54f99, cell 21; an early scheduler; turns are sequential",
        "5/10/20/30/40/50",
        """
        mean_normalised preble      .127/.155/.174/.197/.415/-
        mean_normalised round_robin .156/.243/.297/.335/.360/.355
        p99_ttft        preble      13.5/14.3/13.7/14.7/23/-
        p99_ttft        round_robin 12.2/12.5/10.8/12.3/18.9/-
        """,
        {},
    ),
)  # fmt: skip
CURVES: tuple[Curve, ...] = tuple(curve for panel in PANELS for curve in panel.curves())

# Figure 8's only kept numbers: the log of one run with Azure arrivals, a mix of tool use and video QA, 4 A6000, Preble.
# What was mixed: the log's heading has 180 groups and, of the source that was made last, 2,045 requests; the
# configuration beside it (multi_exp_configs/e2e_mix_config_trace.py) has 180 groups and 2,000 requests of each, tools
# rounded down to 11 a group. The run took 297 s: 0.7 times the 2,045 rows of the conversation trace are 293 s, 0.7
# times 1,980 of the code trace 463 s.
AZURE_MIX: dict[str, float] = {
    "gpus": 4,
    "groups": 180,
    "requests": 4025,
    "tools": 1980,
    "videos": 2045,
    "scale": 0.7,
    "mean_latency": 1.939,
    "sd_latency": 2.636,
    "p50_latency": 1.271,
    "p90_latency": 4.403,
    "p99_latency": 14.917,
    "max_latency": 21.4,
    "mean_ttft": 0.418,
    "p50_ttft": 0.221,
    "p90_ttft": 0.747,
    "p99_ttft": 3.81,
    "mean_tpot": 0.0532,
    "p50_tpot": 0.0416,
    "p90_tpot": 0.0855,
    "p99_tpot": 0.373,
    "mean_normalised": 0.0598,
    "requests_per_second": 13.55,
    "mean_scheduling_seconds": 0.0129,
    "max_scheduling_seconds": 0.121,
}
AZURE_MIX_REQUESTS_BY_GPU = (1057, 1149, 971, 848)
AZURE_MIX_SOURCE = "branch VE_H100, multi_node/benchmarks/trace_toolbench/results.txt"

RATIOS = (
    Ratio("all", "round_robin", "mean_latency", 1.5, 14.5),
    Ratio("all", "round_robin", "p99_latency", 2.0, 10.0),
    Ratio("all", "oracle", "mean_latency", 1.15, 7.5),
    Ratio("all", "oracle", "p99_latency", 1.6, 4.5),
    Ratio("programming", "round_robin", "mean_latency", 1.56, 1.8),
    Ratio("programming", "round_robin", "p99_latency", 3.0, 4.0),
)
# From two GPUs to four, the rate served at equal latency.
SCALING_RATIO = 2.0
# Figure 10: what is added, in order, and the metrics that each step improves.
ABLATION = (
    ("e2", ("mean_latency", "p99_latency")),
    ("rebalance_and_autoscale", ("mean_latency", "p99_latency")),
    ("prefill_decode", ("mean_latency", "p99_latency")),
    ("priority_queue", ("p99_latency",)),
)
# Requests a second through the global scheduler, by workload and number of prefix groups where that is reported.
SCHEDULER_REQUESTS_PER_SECOND = {("tool_use", 200): 634.0, ("tool_use", 1500): 245.0, ("video_qa", None): 2931.0}
# KV tokens of one GPU: of the authors' A6000 with Mistral-7B, and of another of their hosts.
A6000_KV_TOKENS = 198_516
A6000_KV_TOKENS_ELSEWHERE = 237_245


def _iterations(text: str) -> tuple[Iteration, ...]:
    """Iterations from "new@context=milliseconds" texts."""
    parsed = []
    for item in text.split():
        tokens, milliseconds = item.split("=")
        new, context = tokens.split("@")
        parsed.append(Iteration(int(new), int(context), float(milliseconds) / 1000.0))
    return tuple(parsed)


# What the authors' regression gives for Mistral-7B on an A6000, with its middle branch made a straight line.
A6000_ITERATIONS = _iterations(
    "512@2000=66.9 1800@1800=235.7 512@8192=95 8192@8192=1183 512@23500=147 23500@23500=4260"
)
# Measured by the authors, Llama-3-70B on four GPUs (model_equation_aio_regression.py at 2705088).
H100_ITERATIONS = _iterations("""
    1@8192=56.57 16@8192=56.6 64@8192=66.4 128@8192=63.72 256@8192=67.42 512@8192=80.15 1024@8192=122.98
    2048@8192=191.95 4096@8192=357.6 8192@8192=771.88 14166@14166=1338.21 28232@28232=2942.76 256@4096=52.29
    512@4096=66.37 1024@4096=106.91 512@16384=106.89 512@32768=158.81 4096@4096=368.25
""")
A100_ITERATIONS = _iterations("""
    1@8192=72 16@8192=90 64@8192=100.01 128@8192=95.3 256@8192=126.48 512@8192=191.11 1024@8192=271.66
    2048@8192=432.36 4096@8192=780.74 8192@8192=1709.52 14166@14166=3280.41 28232@28232=7302.69 256@4096=114.77
    512@4096=155.44 1024@4096=247.47 512@16384=211.13 512@32768=277.95 4096@4096=757.33
""")


def find(workload: str, gpus: int, metric: str, *, simulated: bool | None = False) -> dict[str, Curve]:
    """Curves of one panel by policy; {} where nothing is kept. `simulated` None takes both kinds, GPUs first."""
    found: dict[str, Curve] = {}
    for curve in sorted(CURVES, key=lambda curve: curve.simulated):
        wanted = curve.workload == workload and curve.gpus == gpus and curve.metric == metric
        if wanted and simulated in (None, curve.simulated):
            found.setdefault(curve.policy, curve)
    return found
