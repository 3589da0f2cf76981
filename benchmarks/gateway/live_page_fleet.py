"""Makes docs/figures/live-page-fleet.png: `python -m benchmarks.gateway.live_page_fleet`; with `--look FOLDER` pictures
at three widths, light and dark, to be looked at. Owns the fleet that they show: 64 made-up workers on a manual clock,
whose prompts the real scheduler places for five minutes (seed 0); one is lost, one drains, one is silent. Starts no
process but the browser. Needs playwright (extra `test`) and a chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from playwright.sync_api import Page, Route, sync_playwright

from preble import GlobalScheduler, ManualClock
from preble.gateway.core.request_context import RequestContext
from preble.gateway.dashboard.state import HISTORY_TICKS, Live
from preble.router.fleet import AddressCounters
from preble.router.router import RouterCounters
from preble.scheduling.records import DecisionRecording

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "preble" / "gateway" / "dashboard" / "page"
FIGURES = ROOT / "docs" / "figures"
Scheme = Literal["light", "dark"]
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
ORIGIN = "http://gateway.test"
WIDTHS = {1440: 900, 820: 1180, 390: 844}
CAPACITY_TOKENS = 180_000
FACTS = {"version": "0.1.0", "models": ["llama-3.1-8b-instruct"], "record_share": 0.1, "live_choices": 0}


class MadeUpFleet:
    """Workers that are plain objects, and the live state of a gateway before them."""

    def __init__(self, workers: int, seed: int = 0) -> None:
        self.clock = ManualClock(1000.0)
        self.rng = random.Random(seed)
        names = [f"gpu-{number:02d}" for number in range(workers)]
        self.scheduler = GlobalScheduler(names, clock=self.clock, record=DecisionRecording(per_second=10))
        self.workers = {f"tcp://10.0.0.{number}:5600": self._worker(name) for number, name in enumerate(names)}
        self.counters = RouterCounters()
        fleet = SimpleNamespace(workers=self.workers)
        router: Any = SimpleNamespace(fleet=fleet, counters=self.counters, scheduler=self.scheduler)
        self.live = Live(router, self.clock)
        self._ends: list[tuple[float, Any, int]] = []
        self._prefixes = [
            [self.rng.randrange(30_000) for _ in range(n)] for n in (3200, 2400, 1800, 1500, 900, 700, 500)
        ]
        self._own = 50_000
        self._shares = {name: self.rng.uniform(0.3, 1.0) for name in names}  # how often it may be chosen

    def _worker(self, name: str) -> Any:
        welcome = SimpleNamespace(engine="sglang", model=FACTS["models"][0], kv_capacity_tokens=CAPACITY_TOKENS)
        pong = SimpleNamespace(waiting=0, running=0, kv_used_tokens=0, kv_cached_tokens=0)
        return SimpleNamespace(
            worker_id=name, state="ready", why="", epoch=1, welcome=welcome, pong=pong, counters=AddressCounters()
        )

    def run(self, ticks: int, rate: float) -> None:
        """So many seconds of traffic at about so many requests in each."""
        for tick in range(ticks):
            wave = 1.0 + 0.5 * ((tick // 40) % 3)
            for _ in range(self.rng.randrange(int(rate * wave * 0.7), int(rate * wave * 1.3) + 1)):
                self._place()
            self._troubles(tick - ticks)
            self.clock.advance(1.0)
            self._end()
            self.scheduler.tick()
            asyncio.run(self.live.tick())

    def _place(self) -> None:
        prefix = self._prefixes[min(int(self.rng.expovariate(0.6)), len(self._prefixes) - 1)]
        own = range(self._own, self._own + self.rng.randrange(60, 900))
        self._own = own.stop
        cards = self.workers.values()
        out = [w.worker_id for w in cards if w.state != "ready" or self.rng.random() > self._shares[w.worker_id]]
        decision = self.scheduler.schedule([*prefix, *own], max_new_tokens=400, exclude=out)
        wait = 0.04 + self.rng.expovariate(8.0)
        job = SimpleNamespace(token_ids=range(decision.prompt_tokens))
        choice = SimpleNamespace(
            decision=decision, worker=decision.worker, cached_tokens=decision.matched_tokens, job=job
        )
        choice.prompt_tokens = decision.prompt_tokens
        choice.seconds_per_token = 0.016 + self.rng.expovariate(120.0)
        self.counters.requests += 1
        self.live.placed(choice)  # type: ignore[arg-type]
        self.live.first_token(wait)
        self.scheduler.first_token(decision.request_id, cached_tokens=decision.matched_tokens)
        self._ends.append((self.clock() + self.rng.uniform(2.0, 9.0), choice, self.rng.randrange(80, 400)))

    def _end(self) -> None:
        now = self.clock()
        due = [one for one in self._ends if one[0] <= now]
        self._ends = [one for one in self._ends if one[0] > now]
        for _, choice, tokens in due:
            self.scheduler.finish(choice.decision.request_id, output_tokens=tokens)
            self.counters.output_tokens += tokens
            self.counters.finished += 1
            context = RequestContext("", now)
            context.progress.choices = [choice]
            self.live.answered(self.rng.choices((200, 429, 500), (0.985, 0.012, 0.003))[0], context)
        running: dict[str, int] = {}
        for _, choice, _ in self._ends:
            running[choice.worker] = running.get(choice.worker, 0) + 1
        stats = self.scheduler.stats()["workers"]
        for worker in self.workers.values():
            there = running.get(worker.worker_id, 0)
            worker.pong.running, worker.pong.waiting = min(there, 8), max(there - 8, 0)
            worker.pong.kv_cached_tokens = min(stats[worker.worker_id]["cached_tokens"], CAPACITY_TOKENS)

    def _troubles(self, ticks_left: int) -> None:
        """What happens in the last minute."""
        cards = list(self.workers.values())
        if ticks_left == -24 and len(cards) > 17:
            cards[17].state, cards[17].why = "lost", "it does not answer"
        if ticks_left == -14 and len(cards) > 40:
            self.scheduler.drain_worker(cards[40].worker_id)
        if ticks_left == -6 and len(cards) > 52:
            cards[52].state, cards[52].why = "suspect", "silent for 3.2 s"

    def state(self, after: int) -> bytes:
        """What the page is told."""
        return self.live.state(after, {**FACTS, "ready": True, "draining": False, "tasks": 1})

    def decision(self, sequence: int) -> str:
        """One decision, explained."""
        plain = {"default": lambda value: dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)}
        return json.dumps(self.live.decision(sequence), **plain)  # type: ignore[arg-type]


def answer(fleet: MadeUpFleet, route: Route) -> None:
    """What a gateway would say to the page."""
    path, _, query = route.request.url.removeprefix(ORIGIN).partition("?")
    if path == "/v1/preble/state":
        route.fulfill(body=fleet.state(int(query.partition("=")[2])), content_type="application/json")
    elif path.startswith("/v1/preble/decisions/"):
        route.fulfill(body=fleet.decision(int(path.rpartition("/")[2])), content_type="application/json")
    else:
        file = PAGE / (path.rpartition("/")[2] or "index.html")
        route.fulfill(body=file.read_bytes(), content_type=KINDS[file.suffix])


def pages(fleet: MadeUpFleet, widths: dict[int, int], schemes: Sequence[Scheme]) -> Iterator[tuple[str, Page]]:
    """The page of a fleet in a browser, by width and scheme."""
    browsers = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    with sync_playwright() as driver:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=next(browsers), args=arguments)
        for width, height in widths.items():
            for scheme in schemes:
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.on("pageerror", lambda error: print(f"error in the page: {error}"))
                page.route("**/*", lambda route: answer(fleet, route))
                page.goto(f"{ORIGIN}/")
                page.locator(".worker").first.wait_for()
                yield f"{width}-{scheme}", page
                page.close()
        browser.close()


def main() -> None:
    """Make the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--look", type=Path, metavar="FOLDER", help="every width and scheme into this folder instead")
    parser.add_argument("--workers", type=int, default=64, help="how many workers there are")
    args = parser.parse_args()
    fleet = MadeUpFleet(args.workers)
    fleet.run(HISTORY_TICKS, rate=0.62 * args.workers)
    if args.look is None:
        for _, page in pages(fleet, {1440: WIDTHS[1440]}, ("light",)):
            page.screenshot(path=str(FIGURES / "live-page-fleet.png"))
        return
    args.look.mkdir(parents=True, exist_ok=True)
    for name, page in pages(fleet, WIDTHS, ("light", "dark")):
        page.screenshot(path=str(args.look / f"{name}.png"))
        page.screenshot(path=str(args.look / f"{name}-whole.png"), full_page=True)
        page.locator(".worker").nth(5).click()
        page.locator("#worker .chart").first.hover()
        page.screenshot(path=str(args.look / f"{name}-worker.png"))
        page.keyboard.press("Escape")
        page.locator(".decision").nth(2).click()
        page.locator("#decision tbody tr").first.wait_for()
        page.screenshot(path=str(args.look / f"{name}-decision.png"))


if __name__ == "__main__":
    main()
