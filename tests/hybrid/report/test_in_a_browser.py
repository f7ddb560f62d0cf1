"""Reports and the site in headless Chromium: charts are there, nothing is fetched or blocked.

The pictures stay in build/screenshots, to be looked at. Skipped where there is no Chromium.
"""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from answers import output
from matplotlib.image import imread

ROOT = Path(__file__).parents[3]
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars"),
    *("--enable-logging=stderr", "--virtual-time-budget=20000"),
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not BROWSER, reason="there is no Chromium"),
]


@pytest.fixture
def browse(tmp_path):
    """A page's elements once its scripts have run, what the browser complained of, its picture."""

    def look(address, name, height=2400):
        shots = ROOT / "build" / "screenshots"
        shots.mkdir(parents=True, exist_ok=True)
        common = [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--window-size"]
        common[-1] += f"=1400,{height}"
        elements = _answer([*common, "--dump-dom", address])
        _answer([*common, f"--screenshot={shots / name}", address])
        complaints = [line for line in elements.stderr.splitlines() if "CONSOLE" in line]
        return elements.stdout, complaints, imread(shots / name)

    return look


def _answer(words):
    done = subprocess.run(words, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return done


def check(found, least_charts):
    document, complaints, pixels = found
    assert document.count('role="img"') == document.count("<svg") >= least_charts
    assert complaints == []
    assert len({tuple(p) for p in pixels[::7, ::7, :3].reshape(-1, 3).tolist()}) > 20


def test_the_report_of_one_run(hybrid, run_folder, browse):
    output(hybrid("report", run_folder))
    check(browse((run_folder / "report" / "index.html").as_uri(), "one-run.png"), 7)


def test_three_methods_with_three_seeds_each(hybrid, tmp_path, browse):
    """Nine trainings of two seconds."""
    runs = []
    for solver in ("backprop", "ddg", "augmented-lagrangian"):
        for seed in (0, 1, 2):
            runs.append(tmp_path / f"{solver}-{seed}")
            words = ("--solver", solver, "--seed", seed, "--blocks", 2, "--out", runs[-1])
            output(hybrid("train", "--epochs", 4, "--batch-size", 32, "--lr", 0.05, *words))
    output(hybrid("report", *runs, "--out", tmp_path / "page"))
    page = (tmp_path / "page" / "index.html").as_uri()
    check(browse(page, "nine-runs.png", height=4200), 13)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Its address; files served from this machine, as a site would be."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(build, cwd=ROOT, env=quiet, check=True, timeout=300)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    handler.func.log_message = lambda *_: None  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("", ("hybrid", "auxiliary variables")),
        ("choosing/", ("Which method", "ranks")),
        ("tutorial/", ("Install", "The first run")),
        ("networks/", ("local-updates", "two inputs")),  # a wide table
    ],
)
def test_pages_of_the_site(site, browse, page, words):
    document, _, pixels = browse(f"{site}/{page}", f"site-{page.strip('/') or 'front'}.png", 1800)
    assert all(word in document for word in words)
    assert pixels[..., :3].std() > 0.02
