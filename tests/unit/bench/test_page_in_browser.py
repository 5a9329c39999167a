"""The page of a report as headless Chromium shows it: no errors, sortable tables, visible charts."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from commlib.bench.page import page, runs
from tests.unit.bench import sweeps

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
browser = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(browser is None, reason="no Chromium here: ci/setup installs one where it may")


def look(path, *options):
    """Return what Chromium writes to standard output, and the messages on the page's console."""
    command = [
        str(browser),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
    ]
    done = subprocess.run(
        [*command, *options, path.as_uri()], capture_output=True, text=True, timeout=60, check=True, cwd=path.parent
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    paths = [folder / "monday.jsonl", folder / "tuesday.jsonl"]
    sweeps.write(paths[0])
    sweeps.write(paths[1], slower=0.5)
    page_file = folder / "report.html"
    page_file.write_text(page.render([runs.read(path) for path in paths]))
    return page_file


# Clicks twice on "size" for the largest first, filters, and changes the theme; then reports what it sees.
SCRIPT = """
<script>
const table = document.querySelector('table[data-name="cases"]');
const size = [...table.tHead.rows[0].cells].find((cell) => cell.textContent === "size");
size.click(); size.click();
const first = table.tBodies[0].rows[0].cells[6].textContent;
const input = document.querySelector("input.filter");
input.value = "2x2 ALL_REDUCE";
input.dispatchEvent(new Event("input"));
const seen = [...table.tBodies[0].rows].filter((row) => row.offsetParent !== null).length;
const before = getComputedStyle(document.body).backgroundColor;
document.getElementById("theme").click();
const after = getComputedStyle(document.body).backgroundColor;
const boxes = [...document.querySelectorAll("figure svg")].map((svg) => svg.getBoundingClientRect());
const charts = boxes.filter((box) => box.width > 600 && box.height > 150).length;
document.title = JSON.stringify({first, seen, themes: before !== after, charts});
ERROR
</script>
"""


def test_a_report_sorts_filters_and_has_no_errors(report):
    acted = report.with_name("acted.html")
    acted.write_text(report.read_text().replace("</body>", SCRIPT.replace("ERROR", "") + "</body>"))
    dom, console = look(acted, "--dump-dom")
    assert console == []
    title = re.search("<title>(.*)</title>", dom)
    assert title is not None and title[1] == '{"first":"1M","seen":3,"themes":true,"charts":4}'


def test_an_error_of_the_page_is_seen(report):
    broken = report.with_name("broken.html")
    broken.write_text(report.read_text().replace("</body>", SCRIPT.replace("ERROR", "nothing.here();") + "</body>"))
    assert "nothing is not defined" in " ".join(look(broken, "--dump-dom")[1])


def test_the_picture_shows_charts(report):
    import numpy as np
    from matplotlib.image import imread

    picture = report.with_name("page.png")
    look(report, "--window-size=1280,2400", f"--screenshot={picture}")
    pixels = (imread(picture)[..., :3] * 255).round().astype(np.int64) @ [1 << 16, 1 << 8, 1]
    colours, counts = np.unique(pixels, return_counts=True)
    assert pixels.shape == (2400, 1280) and counts.max() < 0.97 * pixels.size
    shown = dict(zip(colours.tolist(), counts.tolist(), strict=True))
    for colour in (0x0969DA, 0xCF222E, 0x1A7F37):  # commlib, mpi, what is faster
        assert shown.get(colour, 0) > 100, hex(colour)
