"""The live page in a real browser, before a real gateway and real worker processes: what an operator sees and clicks.

Needs playwright (of the extra `test`) and a chromium; without them these tests are skipped. Every wait is for something
to be seen, never for a time to pass. The numbers behind the page are tested in test_page_state.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from preble._placement.bookings import REASON_NAMES
from tests.support.gateway import Client, GatewayProcess
from tests.support.transport import HANG_SECONDS, WorkerProcess

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'preble[test]'")
expect = playwright.expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")

MARKUP = '"><img src=x onerror="document.title=1">&amp;'
NAMES = ("plain", MARKUP)
SECRET_TOKEN = 31_337
PREFIX = [SECRET_TOKEN] * 900
WAIT_MS = 1000 * HANG_SECONDS
KEY, ADMIN = "a-key-for-requests", "a-key-for-operators"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One chromium for all tests."""
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        expect.set_options(timeout=WAIT_MS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def workers() -> Iterator[list[WorkerProcess]]:
    """Two simulated workers; one has a name that is markup."""
    processes = [WorkerProcess("--id", name, time_scale=0.01) for name in NAMES]
    yield processes
    for process in processes:
        process.stop()


@pytest.fixture(scope="module")
def gateway(workers: list[WorkerProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway in front of both, that has answered some requests with a prefix in common."""
    log = tmp_path_factory.mktemp("gateway") / "log"
    process = GatewayProcess("--workers", *(worker.endpoint for worker in workers), "--min-workers", "2", log=log)
    client = Client(process.address)
    for number in range(6):
        complete(client, [*PREFIX, *range(number, number + 40)])
    client.close()
    yield process
    process.stop()


def complete(client: Client, prompt: list[int], request_id: str = "") -> None:
    """One request."""
    body = {"model": "simulated", "prompt": prompt, "max_tokens": 4}
    headers = {"x-request-id": request_id} if request_id else {}
    status, _, _ = client.call("POST", "/v1/completions", body, headers)
    assert status == 200


@contextlib.contextmanager
def opened(browser: Any, url: str) -> Iterator[Any]:
    """A new tab that shows a gateway's page."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(url)
    yield page
    context.close()


@pytest.fixture
def page(browser: Any, gateway: GatewayProcess) -> Iterator[Any]:
    """The page, open and showing the fleet; it must have no errors and ask nobody but the gateway."""
    asked: list[str] = []
    errors: list[str] = []
    with opened(browser, "about:blank") as page:
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(gateway.url)
        expect(page.locator(".worker")).to_have_count(2)
        yield page
    assert not errors
    assert len(asked) >= 5 and all(url.startswith(f"{gateway.url}/") for url in asked), "nothing foreign may load"


def state_of(gateway: GatewayProcess) -> dict[str, Any]:
    """What the page is reported."""
    client = Client(gateway.address)
    status, _, state = client.call("GET", "/v1/preble/state?after=0")
    client.close()
    assert status == 200
    return dict(state)


# --- what is seen -----------------------------------------------------------------------------------------------------


def test_workers_are_listed_with_their_state_and_numbers(page: Any) -> None:
    expect(page.locator("#gateway-state")).to_have_text("ready")
    expect(page.locator("#workers-count")).to_have_text("2 ready")
    expect(page.locator(".worker.is-ready")).to_have_count(2)
    expect(page.locator("#tile-hit strong")).to_have_text(re.compile(r"^\d+ %$|^–$"))
    expect(page.locator("#tile-requests_per_second .note")).to_have_text(re.compile(r"live, \d+ so far"))
    lines = page.locator(".worker.is-ready .meter.blue path.line")
    expect(lines).to_have_count(2)
    expect(lines.first).to_have_attribute("d", re.compile(r"^M.*L"))


def test_charts_grow_while_one_looks(page: Any) -> None:
    line = page.locator("#tile-waiting path.line")
    points = line.get_attribute("d").count("L")
    expect(line).to_have_attribute("d", re.compile(rf"^M[^L]*(L[^L]*){{{points + 2},}}$"))


def test_a_name_that_is_markup_stays_text(page: Any) -> None:
    names = page.locator(".worker .name")
    assert sorted(names.all_text_contents()) == sorted(NAMES)
    assert page.locator("img[src=x]").count() == 0
    assert page.title() == "Preble"


def test_hot_prefixes_show_where_they_live_and_never_what_they_say(page: Any, gateway: GatewayProcess) -> None:
    hottest = page.locator(".prefix").first
    expect(hottest).to_contain_text("900 tokens")
    expect(hottest.locator(".chip").first).to_have_text(re.compile("|".join(map(re.escape, NAMES))))
    assert str(SECRET_TOKEN) not in json.dumps(state_of(gateway)), "a prompt's tokens are never reported"
    assert str(SECRET_TOKEN) not in page.content()


def test_a_click_on_a_decision_shows_every_workers_terms(page: Any, gateway: GatewayProcess) -> None:
    client = Client(gateway.address)
    complete(client, [*PREFIX, 9001, 9002, 9003], "the-one-to-explain")
    row = page.locator('.decision[title*="the-one-to-explain"]')
    sequence = row.get_attribute("data-sequence")
    _, _, told = client.call("GET", f"/v1/preble/decisions/{sequence}")
    client.close()
    row.click()
    dialog = page.locator("#decision")
    expect(dialog.locator("tbody tr")).to_have_count(2)
    expect(dialog.locator("#decision-title")).to_have_text(f"{told['worker']}: exploit")
    expect(dialog.locator("tr.is-chosen .name")).to_have_text(told["worker"])
    expect(dialog.locator("tr.is-chosen td").nth(1)).to_have_text(str(told["chosen"]["matched_tokens"]))
    expect(dialog).to_contain_text(f"{told['chosen']['matched_tokens']} of 903 prompt tokens estimated cached")
    expect(dialog).to_contain_text("request the-one-to-explain")
    assert told["chosen"]["matched_tokens"] == 900
    assert {terms["worker"] for terms in told["terms"]} == set(NAMES)
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


# Of each row of the dialog's table its bar's parts, as shares of the bar, by their classes.
BARS = """rows => rows.map(row => Object.fromEntries([...row.querySelectorAll(".parts i")].map(
    part => [part.className, part.getBoundingClientRect().width / part.parentNode.getBoundingClientRect().width])))"""
PRICE = ("queue", "prefill", "others", "decode", "eviction", "balance")  # and a credit, which is taken off


def test_the_terms_of_a_price_fill_its_bar(page: Any, browser: Any, gateway: GatewayProcess) -> None:
    told = decision_of(page, gateway)
    cheap, dear = told["terms"]
    dear |= {f"{name}_seconds": float(number) for number, name in enumerate(PRICE, 1)}
    dear |= {"credit_seconds": -1.0, "total_seconds": 20.0, "score": 20.0, "load_seconds": 70.0, "backlog_seconds": 8.0}
    cheap |= {f"{name}_seconds": 0.0 for name in (*PRICE, "credit")}
    cheap |= {"queue_seconds": 0.75, "balance_seconds": 1.5, "total_seconds": 2.25, "score": 2.25}
    answer_with(page, {**told, "worker": cheap["worker"], "chosen": cheap})
    rows = page.locator("#decision tbody tr")
    expect(rows).to_have_count(2)
    headings = page.locator("#decision th").all_text_contents()
    assert headings == ["Worker", "Cached", *(name.title() for name in PRICE), "Credit", "Total", "", "Load", "Backlog"]
    cells = [rows.nth(1).locator("td").nth(number).text_content() for number in range(2, 13)]
    assert cells == [*(f"{number},000" for number in range(1, 7)), "-1,000", "20,000", "", "70 s", "8.00 s"]
    expect(page.locator("#decision .scroll .note")).to_have_text("Prices in ms; the terms add up to the total.")
    shares = rows.evaluate_all(BARS)
    assert shares[0] == pytest.approx({**dict.fromkeys(PRICE, 0.0), "queue": 0.75 / 21, "balance": 1.5 / 21}, abs=0.01)
    assert shares[1] == pytest.approx({name: number / 21 for number, name in enumerate(PRICE, 1)}, abs=0.01)
    colours = "parts => parts.map(part => getComputedStyle(part).backgroundColor)"
    for where, kinds in (("#decision .legend i", 7), ("#decision tbody tr:nth-child(2) .parts i", 6)):
        assert len(set(page.locator(where).evaluate_all(colours))) == kinds, "no two look the same"


def test_what_is_loaded_is_a_term_and_a_part_of_what_is_cached(page: Any, gateway: GatewayProcess) -> None:
    told = decision_of(page, gateway)
    for terms in told["terms"]:
        terms |= {f"{name}_seconds": 1.0 for name in PRICE}
        terms |= {"credit_seconds": 0.0, "total_seconds": 6.0, "score": 6.0}
    one = told["terms"][0]
    one |= {"loading_seconds": 2.0, "total_seconds": 8.0, "score": 8.0, "matched_tokens": 450}
    one |= {"host_tokens": 200, "disk_tokens": 100}
    answer_with(page, {**told, "prompt_tokens": 900, "worker": one["worker"], "chosen": one})
    rows = page.locator("#decision tbody tr")
    expect(rows).to_have_count(2)
    names = ["Queue", "Prefill", "Loading", "Others", "Decode", "Eviction", "Balance", "Credit", "Total"]
    assert page.locator("#decision th").all_text_contents()[2:11] == names
    assert [rows.nth(0).locator("td").nth(at).text_content() for at in (3, 4, 10)] == ["1,000", "2,000", "8,000"]
    assert rows.nth(1).locator("td").nth(4).text_content() == "0"
    assert rows.evaluate_all(BARS)[0]["loading"] == pytest.approx(2 / 8, abs=0.01)
    expect(page.locator("#decision .legend i.loading")).to_have_count(1)
    line = page.locator("#decision .fact-line")
    expect(line).to_contain_text("450 of 900 prompt tokens estimated cached (50 %), 200 of them in host memory, 100 of")
    assert line.locator(".parts i").evaluate_all("all => all.map(one => one.style.width)") == ["16.6667%", "33.3333%"]
    colours = "parts => parts.map(part => getComputedStyle(part).backgroundColor)"
    assert len(set(page.locator("#decision .legend i").evaluate_all(colours))) == 8, "no two look the same"


@pytest.mark.parametrize("size", [1e-7, 3e-5, 0.004, 0.7, 12.0, 400.0])
def test_the_terms_that_are_shown_add_up_to_the_total_that_is_shown(
    page: Any, gateway: GatewayProcess, size: float
) -> None:
    told = decision_of(page, gateway)
    rng = random.Random(size)
    for terms in told["terms"]:
        terms |= {f"{name}_seconds": rng.choice((0.0, rng.random() * size)) for name in PRICE}
        terms["credit_seconds"] = -rng.random() * size / 5
        total = sum(terms[f"{name}_seconds"] for name in (*PRICE, "credit"))
        terms |= {"total_seconds": total, "score": total}
    answer_with(page, {**told, "chosen": told["terms"][0], "worker": told["terms"][0]["worker"]})
    rows = page.locator("#decision tbody tr")
    expect(rows).to_have_count(2)
    for row in range(2):
        cells = rows.nth(row).locator("td").all_text_contents()[2:10]
        numbers = [Decimal(cell.replace(",", "")) for cell in cells]
        assert sum(numbers[:7]) == numbers[7], cells


@pytest.mark.parametrize("reason", REASON_NAMES)
def test_every_reason_has_words_of_its_own(page: Any, gateway: GatewayProcess, reason: str) -> None:
    told = decision_of(page, gateway)
    answer_with(page, {**told, "reason": reason, "runner_up": MARKUP, "margin": -0.25})
    why = page.locator("#decision .reason-text")
    expect(why).to_contain_text(f"{MARKUP} would have cost 250 ms less.")
    assert "The rule of policy" not in why.text_content()


def decision_of(page: Any, gateway: GatewayProcess) -> dict[str, Any]:
    """What the gateway says of the first decision that the page lists."""
    sequence = page.locator(".decision").first.get_attribute("data-sequence")
    client = Client(gateway.address)
    status, _, told = client.call("GET", f"/v1/preble/decisions/{sequence}")
    client.close()
    assert status == 200
    return dict(told)


def answer_with(page: Any, told: dict[str, Any]) -> None:
    """Open the first decision, of which the gateway says this."""
    page.route("**/v1/preble/decisions/*", lambda route: route.fulfill(json=told))
    page.locator(".decision").first.click()


def test_a_decision_can_be_opened_from_the_keyboard(page: Any) -> None:
    row = page.locator(".decision").first
    row.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#decision tr.is-chosen")).to_have_count(1)
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#decision")).to_be_hidden()


@pytest.mark.parametrize("width", [360, 390, 768, 820, 1000, 1280])
def test_nothing_is_wider_than_the_screen(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator(".decision").first.click()
    expect(page.locator("#decision tr.is-chosen")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for box in ("#decision", "#decision .scroll"):
        hidden = page.locator(box).evaluate("box => box.scrollWidth - box.clientWidth")
        assert hidden <= 0, f"{box} is scrolled sideways by {hidden} px"


@pytest.mark.parametrize("width", [390, 820])
def test_on_a_narrow_screen_every_term_of_a_price_has_its_name_beside_it(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.locator(".decision").first.click()
    cells = page.locator("#decision tr.is-chosen td")
    expect(cells.first).to_be_visible()
    shown = cells.evaluate_all("cells => cells.map(cell => getComputedStyle(cell, '::before').content)")
    names = ["Cached", *(name.title() for name in PRICE), "Credit", "Total"]
    assert shown[1 : 1 + len(names)] == [f'"{name}"' for name in names]
    assert not page.locator("#decision thead").is_visible()


def test_it_is_dark_where_the_reader_likes_it_dark(page: Any) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    assert brightness(page.evaluate(ground)) < 60 < 200 < brightness(light)


def brightness(colour: str) -> float:
    """Mean of the channels of rgb(...)."""
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


def many(state: dict[str, Any], count: int, **more: Any) -> dict[str, Any]:
    """The state of a larger fleet: number n has a load of n / count, and the last one is silent."""
    cards = [
        {
            **state["workers"][0],
            **{"id": f"w{i}", "address": f"tcp://{i}", "state": "suspect" if i == count - 1 else "ready"},
            **{
                "load": i / count,
                "waiting": i % 7,
                "history": {"load": [i / count], "waiting": [1], "kv": [0], "hit": [None]},
            },
        }
        for i in range(count)
    ]
    return {**state, "workers": cards, **more}


@contextlib.contextmanager
def shown(browser: Any, gateway: GatewayProcess, state: dict[str, Any]) -> Iterator[Any]:
    """The page of a gateway that reports this."""
    with opened(browser, "about:blank") as page:
        page.route("**/v1/preble/state*", lambda route: route.fulfill(json=state))
        page.goto(gateway.url)
        expect(page.locator(".worker").first).to_be_visible()
        yield page


def names_in(page: Any) -> list[str]:
    """The workers in the order of their rows."""
    return list(page.locator(".worker .name").all_text_contents())


def test_five_hundred_workers_are_shown_in_part_and_all_when_asked(browser: Any, gateway: GatewayProcess) -> None:
    with shown(browser, gateway, many(state_of(gateway), 500, workers_left_out=7)) as page:
        expect(page.locator(".worker.compact")).to_have_count(256)
        expect(page.locator(".worker .name").first).to_have_text("w499")  # the one in trouble
        expect(page.locator("#workers-count")).to_have_text("1 suspect499 ready")
        page.get_by_role("button", name="Show all 500 (7 more are not listed)").click()
        expect(page.locator(".worker")).to_have_count(500)
        page.get_by_role("button", name="Show fewer").click()
        expect(page.locator(".worker")).to_have_count(256)
        page.get_by_role("button", name="Charts").click()
        expect(page.locator(".worker.workers-grid")).to_have_count(24)
        expect(page.locator(".compact")).to_have_count(0)


@pytest.mark.parametrize("width", [1440, 820, 390])
def test_sixty_four_workers_fit_on_one_screen(browser: Any, gateway: GatewayProcess, width: int) -> None:
    with shown(browser, gateway, many(state_of(gateway), 64)) as page:
        page.set_viewport_size({"width": width, "height": 900})
        expect(page.locator(".worker.compact")).to_have_count(64)
        boxes = [one.bounding_box() for one in page.locator(".worker").all()]
        bottom, top = max(box["y"] + box["height"] for box in boxes), min(box["y"] for box in boxes)
        assert bottom - top <= 760, "from the first row to the last"
        assert width < 1440 or bottom <= 900, "and with all that is above them"
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)


def test_workers_are_sorted_and_filtered(browser: Any, gateway: GatewayProcess) -> None:
    with shown(browser, gateway, many(state_of(gateway), 40)) as page:
        assert names_in(page) == ["w39", *(f"w{i}" for i in range(39))], "trouble first"
        order, words = page.locator("#workers-order"), page.locator("#workers-filter")
        order.select_option("load")
        assert names_in(page) == [f"w{i}" for i in reversed(range(40))]
        order.select_option("queue")
        assert names_in(page)[:6] == ["w6", "w13", "w20", "w27", "w34", "w5"]
        order.select_option("name")
        words.fill("W3")
        expect(page.locator(".worker")).to_have_count(11)
        assert names_in(page)[:3] == ["w3", "w30", "w31"]
        expect(page.locator("#loads > span")).to_have_count(11)
        page.locator("#workers-count").get_by_role("button", name="1 suspect").click()
        assert names_in(page) == ["w39"]
        words.fill("nobody")
        expect(page.locator("#workers + .none")).to_have_text("No worker is like that.")
        words.fill("")
        page.locator("#workers-count").get_by_role("button", name="1 suspect").click()
        expect(page.locator(".worker")).to_have_count(40)


def test_the_strip_has_every_load_and_a_worker_opens_with_its_charts(browser: Any, gateway: GatewayProcess) -> None:
    with shown(browser, gateway, many(state_of(gateway), 20)) as page:
        page.locator("#workers-order").select_option("name")
        bars = page.locator("#loads > span > i")
        heights = bars.evaluate_all("bars => bars.map(bar => bar.offsetHeight / bar.parentNode.offsetHeight)")
        assert heights == pytest.approx([i / 20 for i in range(20)], abs=0.05)
        page.locator("#loads > span").nth(10).hover()
        expect(page.locator("#bubble")).to_have_text("w10: load 50 %, 3 waiting")
        page.locator("#loads > span").nth(10).click()
        expect(page.locator("#worker-title")).to_have_text("w10")
        expect(page.locator("#worker-charts .tile")).to_have_count(4)
        expect(page.locator("#worker-details")).to_contain_text("tcp://10")
        page.keyboard.press("Escape")
        expect(page.locator("#worker")).to_be_hidden()
        page.locator('[data-worker="w7"]').press("Enter")
        expect(page.locator("#worker-title")).to_have_text("w7")


def test_a_worker_says_what_lies_below_its_gpus_memory(browser: Any, gateway: GatewayProcess) -> None:
    state = state_of(gateway)
    numbers = {"cached_tokens": 312_000, "away_tokens": 212_345, "kv_capacity_tokens": 100_000, "loaded": 0.25}
    numbers |= {"host_token_seconds": 1e-5, "disk_token_seconds": 5e-5}
    told = many(state, 1, fleet={**state["fleet"], "hit": 0.5, "loaded": 0.25})
    told["workers"][0] |= {**numbers, "hit": 0.5, "kv": 0.99}
    with shown(browser, gateway, told) as page:
        tile = page.locator("#tile-hit > div").first
        expect(tile).to_have_text("From cache50 %25 % of it loaded")
        values = page.locator(".worker .meter .value")
        expect(values.nth(2)).to_have_text("99 %212k below")
        expect(values.nth(3)).to_have_text("50 %25 % below")
        heights = values.evaluate_all("all => all.map(one => one.offsetHeight)")
        assert max(heights) == heights[1], "one line more, as that of the queue"
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.get_by_role("button", name="Compact").click()
        page.locator(".worker.compact").click()
        details = page.locator("#worker-details")
        expect(details).to_contain_text("99,655 of 100,000 tokens estimated cached, 212,345 more in host memory or")
        expect(details).to_contain_text("10 ms for 1,000 tokens from host memory, 50 ms from disk")


def test_a_chart_says_its_scale_and_what_is_under_the_pointer(browser: Any, gateway: GatewayProcess) -> None:
    state = state_of(gateway)
    history = {name: [float(i) for i in range(101)] for name in state["fleet_history"]}
    with shown(browser, gateway, {**state, "fleet_history": history, "tick": 10_000}) as page:
        tile = page.locator("#tile-requests_per_second")
        expect(tile.locator(".scale")).to_have_text("100 /s")
        box = tile.locator(".chart").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 20)
        expect(page.locator("#bubble")).to_have_text("25 /s, 75 s ago")
        hair = tile.locator(".hair").bounding_box()
        assert hair["x"] == pytest.approx(box["x"] + box["width"] * 0.25, abs=2)
        page.mouse.move(0, 0)
        expect(page.locator("#bubble")).to_be_hidden()


def source(name: str, **more: Any) -> dict[str, Any]:
    """A source of discovery as the gateway reports it."""
    whole: dict[str, Any] = {"source": name, "age_seconds": 2.0, "has_answered": True, "is_doubted": False}
    whole |= {"servers": {"serving": 3, "withheld": 1, "draining": 0}, "named": 6, "left_out": 1}
    whole |= {"found": {"ready": 4, "not_ready": 1, "terminating": 0}, "unusable": {"pod llm/c": "preble/rank: many"}}
    whole |= {"workers": {"ready": 3, "refused": 1}, "refused": {"http://10.0.0.4:8000": "refused: another model"}}
    return {**whole, "failures": 0, "failing": "", "keep_failing": "", **more}


def test_sources_of_discovery_are_shown_with_what_became_of_their_servers(
    browser: Any, page: Any, gateway: GatewayProcess
) -> None:
    expect(page.locator("#discovery")).to_be_hidden()  # nothing is looked for
    nobody: dict[str, Any] = {"named": 0, "found": {}, "unusable": {}, "left_out": 0, "has_answered": False}
    gone = dict.fromkeys(("serving", "withheld", "draining"), 0)
    away = {**nobody, "failures": 3, "failing": "the API server does not answer", "refused": {}, "workers": {"lost": 2}}
    sources = [
        source(f"kubernetes:app=vllm {MARKUP}"),
        source("dns:_http._tcp.engines", is_doubted=True),
        source("kubernetes:app=sglang", **away, age_seconds=7200.0, keep_failing="disk full"),
        source("file:/etc/preble/servers.yaml", **away, age_seconds=None, servers=gone),
    ]
    state = state_of(gateway)
    with shown(browser, gateway, {**state, "gateway": {**state["gateway"], "discovery": sources}}) as page:
        rows = page.locator("#sources .source")
        expect(rows).to_have_count(4)
        expect(page.locator("#discovery-note")).to_have_text("4 sources")
        assert rows.locator(".state").all_text_contents() == ["in step", "doubted", "kept list", "no answer"]
        first, _, kept, none = (rows.nth(number) for number in range(4))
        assert first.locator(".number-of b").all_text_contents() == ["6", "4", "2"]
        for text in ("answered 2 s ago", "4 ready, 1 not ready", "3 ready, 1 refused, 1 withheld", "1 left out"):
            expect(first).to_contain_text(text)
        expect(first.locator(".whys")).to_contain_text("pod llm/c preble/rank: many")
        expect(first.locator(".whys")).to_contain_text("http://10.0.0.4:8000 refused: another model")
        expect(kept).to_contain_text("answered 2 h 0 min ago")
        expect(kept.locator(".whys")).to_contain_text("failed 3 times the API server does not answer")
        expect(kept.locator(".whys")).to_contain_text("not kept disk full")
        expect(none).to_contain_text("has not answered yet")
        assert page.locator("img[src=x]").count() == 0
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_errors_throughput_and_time_per_token_are_tiles(browser: Any, gateway: GatewayProcess) -> None:
    state = state_of(gateway)
    fleet = {**state["fleet"], "errors": 0.0125, "output_tokens_per_second": 1234.5, "seconds_per_token_p50": 0.0164}
    totals = {**state["totals"], "failed_answers": 3, "refused_answers": 7, "output_tokens": 99_000}
    with shown(browser, gateway, {**state, "fleet": {**fleet, "seconds_per_token_p99": 0.2}, "totals": totals}) as page:
        expect(page.locator("#fleet .tile")).to_have_count(7)
        told = {
            name: page.locator(f"#tile-{name} > div").first for name in fleet if "p99" not in name and name != "running"
        }
        expect(told["errors"]).to_have_text("Errors1.3 %3 failed, 7 refused")
        expect(told["output_tokens_per_second"]).to_have_text("Output tokens1,235 /s99,000 so far")
        expect(told["seconds_per_token_p50"]).to_have_text("Time per token16 msmedian; p99 200 ms")


def test_plans_are_reported_with_where_they_lead(browser: Any, gateway: GatewayProcess) -> None:
    plan = {"kind": "replica", "phase": "began", "plan": 1, "prefix_tokens": 512, "from_worker": "here"}
    plan |= {"to_worker": MARKUP, "reason": "its load is above 0.8", "saved_seconds": 2.0, "why": None}
    ended = {**plan, "phase": "ended", "why": "the load fell"}
    policy = {"kind": "policy", "before": "e2", "after": "random"}
    told = [{**event, "number": 9 - i, "seconds_ago": 61.0 * i} for i, event in enumerate((ended, plan, policy))]
    state = {**state_of(gateway), "events": told, "events_total": 40}
    with opened(browser, "about:blank") as page:
        page.route("**/v1/preble/state*", lambda route: route.fulfill(json=state))
        page.goto(gateway.url)
        events = page.locator(".event")
        expect(events.nth(0)).to_have_text(f"copy ended512 tokens here → {MARKUP}the load fellnow")
        expect(events.nth(1)).to_have_text(f"copy512 tokens here → {MARKUP}its load is above 0.81 min ago")
        expect(events.nth(2)).to_have_text("policyrandom instead of e22 min ago")
        expect(page.locator("#events-note")).to_have_text("40 so far")
        assert page.locator("img[src=x]").count() == 0


def test_another_process_behind_the_same_address_starts_the_charts_afresh(
    browser: Any, gateway: GatewayProcess
) -> None:
    fresh, restarted = state_of(gateway), []

    def answer(route: Any) -> None:
        after = int(route.request.url.rpartition("=")[2])
        tick, count = (3, 3) if restarted else (10_000, 200)
        history = {name: [1.0] * (0 if after >= tick else count) for name in fresh["fleet_history"]}
        route.fulfill(json={**fresh, "tick": tick, "tick_seconds": 0.05, "fleet_history": history})

    with opened(browser, "about:blank") as page:
        page.route("**/v1/preble/state*", answer)
        page.goto(gateway.url)
        line = page.locator("#tile-waiting path.line")
        expect(line).to_have_attribute("d", re.compile(r"^M[^L]*(L[^L]*){199}$"))
        restarted.append(True)
        expect(line).to_have_attribute("d", re.compile(r"^M[^L]*(L[^L]*){2}$"))


# --- what must not load -----------------------------------------------------------------------------------------------


def test_the_browser_refuses_scripts_in_the_page_and_whatever_is_foreign(browser: Any, gateway: GatewayProcess) -> None:
    with opened(browser, gateway.url) as page:
        refused = page.evaluate(
            """() => new Promise((resolve) => {
                const seen = [];
                document.addEventListener("securitypolicyviolation", (event) => {
                    seen.push(event.effectiveDirective);
                    if (seen.length === 3) resolve(seen.sort());
                });
                const script = document.createElement("script");
                script.textContent = "window.ran = true";
                document.body.append(script);
                const image = document.createElement("img");
                image.src = "http://127.0.0.1:9/x.png";
                document.body.append(image);
                fetch("http://127.0.0.1:9/").catch(() => null);
            })"""
        )
        assert refused == ["connect-src", "img-src", "script-src-elem"]
        assert page.evaluate("window.ran") is None


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def until_the_end() -> Iterator[contextlib.ExitStack]:
    """What is to be stopped at the end of the test, whatever becomes of it."""
    with contextlib.ExitStack() as stack:
        yield stack


def test_where_admin_keys_are_configured_the_page_asks_for_one(
    browser: Any, workers: list[WorkerProcess], tmp_path: Path, until_the_end: contextlib.ExitStack
) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text(
        f'api_keys = ["{KEY}"]\nadmin_keys = ["{ADMIN}"]\nrate_limit_per_minute = 1\nrate_limit_burst = 1\n'
    )
    process = GatewayProcess("--config", str(config), "--workers", workers[0].endpoint, log=tmp_path / "log")
    until_the_end.callback(process.stop)
    page = until_the_end.enter_context(opened(browser, process.url))
    asked = ((None, "Enter one of its admin keys"), ("not-a-key", "was refused"), (KEY, "is a key for requests"))
    for key, why in asked:
        if key is not None:
            page.get_by_label("Admin key").fill(key)
            page.get_by_role("button", name="Show the fleet").click()
        expect(page.locator("#key")).to_contain_text(why)
        expect(page.locator("#main")).to_be_hidden()
    page.get_by_label("Admin key").fill(ADMIN)
    page.keyboard.press("Enter")
    expect(page.locator(".worker")).to_have_count(1)
    page.reload()
    expect(page.locator(".worker")).to_have_count(1)  # the tab remembers the key, and no rate stops the page
    lines = process.log_lines()
    assert not [line for line in lines if line.get("route") == "/v1/preble/state"], "what the page asks is not logged"


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_killed_worker_turns_red_and_a_gateway_that_ends_is_missed(
    browser: Any, tmp_path: Path, until_the_end: contextlib.ExitStack
) -> None:
    workers = [WorkerProcess("--id", name, time_scale=0.01) for name in ("stays", "dies")]
    for worker in workers:
        until_the_end.callback(worker.stop)
    endpoints = [worker.endpoint for worker in workers]
    process = GatewayProcess("--workers", *endpoints, "--min-workers", "2", log=tmp_path / "log")
    until_the_end.callback(process.stop)
    page = until_the_end.enter_context(opened(browser, process.url))
    expect(page.locator(".worker.is-ready")).to_have_count(2)
    row = page.locator('[data-worker="dies"]')
    assert not is_red(row)
    workers[1].signal(signal.SIGKILL)
    expect(row).to_have_class(re.compile("is-lost"))
    expect(row.locator(".state")).to_have_text("lost")
    assert is_red(row)
    expect(page.locator("#gateway-state")).to_have_text("ready, degraded")
    expect(page.locator(".event").first).to_contain_text("dies")
    assert not is_red(page.locator('[data-worker="stays"]'))
    assert page.locator(".worker").first.get_attribute("data-worker") == "dies", "trouble comes first"
    process.stop()
    expect(page.locator("#trouble")).to_contain_text("does not answer")
    expect(page.locator("#gateway-state")).to_have_text("no answer")


def is_red(row: Any) -> bool:
    """Whether a row's edge and its state are mostly red."""
    colours = row.evaluate(
        "row => [getComputedStyle(row).borderLeftColor, getComputedStyle(row.querySelector('.state')).color]"
    )
    channels = [[float(part) for part in re.findall(r"[\d.]+", colour)] for colour in colours]
    return all(len(one) == 3 and one[0] > 180 and max(one[1:]) < 120 for one in channels)
