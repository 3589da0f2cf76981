"""Makes docs/figures/live-page.png and live-page-decision.png: `python -m benchmarks.gateway.live_page`. Owns the fleet
that they show: five simulated workers behind `preble serve`, 75 seconds of prompts with four shared prefixes (seed 0),
one worker killed 16 seconds before the end. Needs playwright (extra `test`) and a chromium.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "figures"
WORKERS = ("alpha", "bravo", "charlie", "delta", "echo")
PREFIX_TOKENS = {"tools": 3200, "manual": 1500, "chat": 900, "short": 420}
SHARES = (0.3, 0.2, 0.3, 0.2)
RATE_PER_SECOND = 12.0
TRAFFIC_SECONDS = 75.0
LOST_SECONDS = 16.0


def started(*words: str) -> tuple[subprocess.Popen[str], str]:
    """`preble WORDS...` and where it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "preble.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split()[1]


def ask(address: str, prompt: list[int], max_tokens: int) -> None:
    """One request; what became of it is the page's to say."""
    connection = http.client.HTTPConnection(address, timeout=60)
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens})
    with contextlib.suppress(OSError, http.client.HTTPException):  # the end cuts off what runs
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        connection.getresponse().read()
    connection.close()


def send(address: str, until: threading.Event) -> None:
    """Prompts at Poisson's times, until `until`."""
    rng = random.Random(0)
    names = {name: [rng.randrange(1000, 30_000) for _ in range(length)] for name, length in PREFIX_TOKENS.items()}
    own = itertools.count(50_000)
    while not until.wait(rng.expovariate(RATE_PER_SECOND)):
        prefix = names[rng.choices(list(names), SHARES)[0]]
        prompt = [*prefix, *itertools.islice(own, rng.randrange(60, 380))]
        threading.Thread(target=ask, args=(address, prompt, rng.randrange(20, 90)), daemon=True).start()


def main() -> None:
    """Start the fleet, wait, lose a worker, look."""
    fleet = [
        started("worker", "--engine", "simulated", "--id", name, "--bind", "tcp://127.0.0.1:*") for name in WORKERS
    ]
    gateway, url = started("serve", "--port", "0", "--workers", *(endpoint for _, endpoint in fleet))
    enough = threading.Event()
    try:
        threading.Thread(target=send, args=(url.removeprefix("http://"), enough), daemon=True).start()
        time.sleep(TRAFFIC_SECONDS - LOST_SECONDS)
        fleet[WORKERS.index("charlie")][0].send_signal(signal.SIGKILL)
        time.sleep(LOST_SECONDS)
        shoot(url)
    finally:
        enough.set()
        for process in (gateway, *(process for process, _ in fleet)):
            process.kill()
            process.wait()


def shoot(url: str) -> None:
    """Keep what the page shows, and one decision opened."""
    browsers = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    with sync_playwright() as driver:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=next(browsers), args=arguments)
        page = browser.new_page(viewport={"width": 1280, "height": 1180})
        page.goto(url)
        page.locator(".worker").nth(len(WORKERS) - 1).wait_for()
        page.wait_for_timeout(2500)
        page.screenshot(path=str(FIGURES / "live-page.png"))
        page.locator(".decision").nth(3).click()
        page.wait_for_timeout(1500)
        page.locator("#decision").screenshot(path=str(FIGURES / "live-page-decision.png"))
        browser.close()


if __name__ == "__main__":
    main()
