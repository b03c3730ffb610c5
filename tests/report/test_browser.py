"""The report and the live page in a real browser: nothing complains, charts are drawn, hostile names stay names."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, find_browser
from liveserver import serving
from PIL import Image
from runfiles import write_run

from fedshift import fit
from fedshift.handover.serve import open_model_server
from fedshift.report import write_report
from fedshift.report.live import LiveServer
from fedshift.report.samples import DataView, DomainSamples, FeaturePoints, PredictedImage, encode

SCRIPT = "<script>alert(1)</script>"
STYLE = "</style><style>*{display:none}</style>"
QUOTES = "\"'><img src=x onerror=alert(2)>"
UNICODE = "東京 \u202e‮ ẞ🩻"
PIXEL = encode(np.full((8, 8, 3), 120, np.uint8))

DRAWN = """(() => { const boxes = [...document.querySelectorAll('polyline, .stack rect, .sky svg')]
    .map((shape) => shape.getBoundingClientRect());
  return boxes.length > 0 && boxes.every((box) => box.width > 0 || box.height > 0); })()"""
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium or Chrome on this machine: the pages were not opened in a browser")
    browser = Browser(program)
    try:
        browser.call("Browser.getVersion")
    except (TimeoutError, OSError) as error:
        browser.close()
        pytest.skip(f"{program} does not start: {error}")
    yield browser
    browser.close()


def hostile_run(path: Path, *, finished: bool = True) -> Path:
    """A run in which every name is an attack; finished, with maps and samples too."""
    run = write_run(
        path,
        "kd3a",
        QUOTES,
        sources=(SCRIPT.replace("/", ""), UNICODE),
        classes=(SCRIPT, STYLE),
        notes={"weight": 0.5, STYLE: 0.2},
        finished=finished,
        config={"setting": "adapt", "attack": [STYLE]},
        results={"setting": "adapt", "dataset": STYLE, "counters": {SCRIPT: 3}},
    )
    sha256 = "ab" * 32
    flat = [(0.1, 0.2), (0.9, 0.8), (0.5, 0.4)]
    features = FeaturePoints(
        domains=[UNICODE, QUOTES],
        targets=[QUOTES],
        classes=[SCRIPT, STYLE],
        domain=[0, 1, 1],
        label=[0, 1, 1],
        before=flat,
        after=flat[::-1],
    )
    shot = PredictedImage(image=PIXEL, prediction=SCRIPT, confidence=0.7, truth=STYLE)
    strip = DomainSamples(domain=QUOTES, is_target=True, looked_at=3, random=[shot], mistakes=[shot])
    view = DataView(key=f"1:400:{sha256}", features=features, samples=[strip], notes=[SCRIPT])
    (run / "gallery.json").write_text(view.model_dump_json())
    return run


@pytest.mark.parametrize(("width", "dark"), [(1160, False), (390, True)])
def test_the_report(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    runs = [hostile_run(tmp_path / "hostile"), write_run(tmp_path / "plain", "csac", notes={"fusion.conv": 0.5})]
    write_report(runs, tmp_path / "report.html")
    page = browser.open((tmp_path / "report.html").as_uri(), width, dark=dark)
    assert page.ask(DRAWN) and page.ask(FITS)
    assert page.ask("document.querySelectorAll('script, iframe, img:not([src^=\"data:image/jpeg\"])').length") == 0
    assert page.ask("document.querySelectorAll('style').length") == 1
    assert page.ask("[...document.images].every((image) => image.naturalWidth > 0)")
    assert page.ask("document.querySelectorAll('.sky svg path').length") == 8
    text = page.ask("document.body.textContent")
    assert all(name in text for name in (SCRIPT, STYLE, QUOTES, UNICODE))
    light = page.ask("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every((part) => part > 200)")
    assert light != dark
    assert page.complaints == []
    page.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with serving(tmp_path / "runs") as server:
        yield server


def next_round(run: Path, number: int) -> None:
    rows = [(SCRIPT.replace("/", ""), "val", 0.9), (QUOTES, "test", 0.1 * number)]
    with (run / "metrics.jsonl").open("a") as file:
        for site, phase, value in rows:
            row = {"round": number, "phase": phase, "site": site, "name": "accuracy", "value": value}
            file.write(json.dumps(row) + "\n")


def test_the_live_page_draws_rounds_as_they_come_and_none_twice(
    browser: Browser, server: LiveServer, tmp_path: Path
) -> None:
    run = hostile_run(tmp_path / "runs" / QUOTES.replace("/", ""), finished=False)
    page = browser.open(server.address, 390)
    page.wait_for("document.getElementById('state').textContent === 'live'")
    assert page.ask("document.querySelectorAll('.watched').length") == 1 and page.ask(FITS)
    address = page.ask("document.querySelector('.watched').href")
    assert page.complaints == []
    page.close()

    page = browser.open(address)
    points = "document.querySelector('.curve.strong polyline').getAttribute('points').split(' ').length"
    page.wait_for("document.getElementById('state').textContent === 'live'")
    assert page.ask(points) == 3 and page.ask(DRAWN)
    assert page.ask("document.querySelectorAll('#part script, #part img, #part style').length") == 0
    text = page.ask("document.getElementById('part').textContent")
    assert all(name in text for name in (QUOTES, UNICODE, SCRIPT.replace("/", "")))

    next_round(run, 4)
    page.wait_for(f"{points} === 4")
    # The connection breaks and comes back: what was drawn stays as it is, and the next round is one more point.
    page.ask("document.querySelector('#part h1').dataset.mark = 'still here'")
    server.stopping.set()
    page.wait_for("document.getElementById('state').textContent !== 'live'")
    server.stopping.clear()
    page.wait_for("document.getElementById('state').textContent === 'live'")
    assert page.ask("document.querySelector('#part h1').dataset.mark") == "still here"
    assert page.ask(points) == 4
    next_round(run, 5)
    page.wait_for(f"{points} === 5")
    assert page.complaints == []

    report = browser.open(page.ask("document.querySelector('.actions a:last-child').href"))
    assert report.ask(DRAWN) and report.complaints == []
    report.close()
    page.close()


def test_a_run_that_begins_appears(browser: Browser, server: LiveServer, tmp_path: Path) -> None:
    page = browser.open(server.address)
    assert "No runs yet" in page.ask("document.body.textContent")
    write_run(tmp_path / "runs" / "new", finished=False)
    page.wait_for("document.querySelectorAll('.watched').length === 1")
    assert "round 3 of 20" in page.ask("document.body.textContent")
    assert page.complaints == []
    page.close()


def test_a_served_model_answers_a_dropped_picture(browser: Browser, tiny_data: Path, tmp_path: Path) -> None:
    run = fit("fedavg", data=tiny_data, target="dim", out=tmp_path / "run", rounds=1, batch_size=16, workers=0)
    Image.fromarray(np.full((20, 30, 3), 130, np.uint8)).save(tmp_path / f"{UNICODE} <b>.png")
    (tmp_path / "broken.png").write_bytes(b"<script>alert(1)</script>")
    with open_model_server(run.path, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        page = browser.open(server.page, 390)
        page.wait_for("!document.getElementById('drop').hidden")
        assert "3 classes" in page.ask("document.body.textContent") and page.ask(FITS)
        page.choose("#file", tmp_path / f"{UNICODE} <b>.png")
        page.wait_for("!document.getElementById('result').hidden")
        assert page.ask("document.querySelectorAll('#bars li').length") == 3
        assert page.ask("document.getElementById('shown').naturalWidth") == 30
        assert "<b>.png" in page.ask("document.getElementById('file-name').textContent") and page.ask(FITS)
        assert page.complaints == []
        page.choose("#file", tmp_path / "broken.png")
        page.wait_for("!document.getElementById('problem').hidden")
        assert "cannot be read" in page.ask("document.getElementById('problem').textContent")
        page.close()
        page = browser.open(server.address)  # without the token
        page.wait_for("!document.getElementById('ask').hidden")
        page.ask(f"document.getElementById('token').value = {server.token!r}")
        page.ask("document.querySelector('#ask button').click()")
        page.wait_for("!document.getElementById('drop').hidden")
        page.close()
        server.shutdown()
        thread.join(10)
