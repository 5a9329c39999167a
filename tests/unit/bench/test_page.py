"""The page of a report, its tables, charts and comparisons, without a browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from commlib.bench.options import BenchOptionsError
from commlib.bench.page import charts, compare, page, runs
from commlib.cli.app import app
from tests.unit.bench import sweeps
from tests.unit.bench.figures import row


class Page(HTMLParser):
    """The cells of each table by name, and everything a page fetches from elsewhere."""

    VOID = ("meta", "link", "input", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self._rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag not in self.VOID:
            self._open.append(tag)
        self.ids += [given["id"]] if given.get("id") else []
        for name in ("src", "href", "xlink:href"):
            if (given.get(name) or "#").split(":")[0] in ("http", "https", "file") or tag in ("img", "iframe"):
                self.fetched.append(str(given))
        if tag == "table":
            self._rows = self.tables.setdefault(given.get("data-name", ""), [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] in ("td", "th"):
            self._rows[-1][-1] += data.strip()


@pytest.fixture
def sweep(tmp_path):
    path = tmp_path / "monday.jsonl"
    sweeps.write(path)
    return path


def test_the_page_has_all_cases_and_is_self_contained(sweep):
    text = page.render([runs.read(sweep)])
    shown = Page(text)
    assert shown.fetched == [] and "http" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", text)
    assert len(shown.ids) == len(set(shown.ids))
    titles, *cases = shown.tables["cases"]
    assert titles[-2:] == ["mpi", "mpi / commlib"] and len(cases) == 8
    assert cases[0] == [
        *("1x2", "all_reduce", "float32", "sum", "auto", "in place", "4K"),
        *("10.4 us", "10.3..10.5 us", "0.39", "-", "20.8 us", "2.00"),
    ]
    assert cases[2][6:11] == ["1M", "115 us", "114..116 us", "9.13", "91%"]
    assert [cases[3][1], cases[3][7]] == ["barrier", "10.0 us"]
    assert [line[-2:] for line in shown.tables["unmeasured"][1:]] == [["refused", "it is <not> there"]] * 6
    assert "A &lt;fast&gt; CPU" in text and "<fast>" not in text


def test_charts_follow_the_page_style_and_are_small(sweep):
    groups = charts.groups(runs.read(sweep))
    assert [group.title.split(":")[0] for group in groups] == ["2 x 2 ranks", "1 x 2 ranks"]
    picture = charts.svg(groups[0])
    assert not re.findall(r"#[0-9a-f]{6}\b", picture) and "var(--c0)" in picture and "var(--c1)" in picture
    for label in ("commlib", "mpi", "bound (memory)", "time, us", "bus bandwidth, GB/s", "4 Ki", "1 Mi"):
        assert label in picture
    assert picture.count("\n") > 50 and len(picture) < 30_000


def test_ratios_are_written_at_powers_of_two(sweep):
    """The axis had the one tick 10^0 for ratios around 2."""
    picture = charts.svg(charts.groups(runs.read(sweep))[0])
    labels = re.findall(r">([\d./]+)<", picture)
    assert labels[-4:] == ["0.5", "1", "2", "4"]
    assert charts.ratio_ticks(0.9, 1.1) == [0.5, 1, 2, 4]
    assert charts.ratio_ticks(0.1, 40) == [0.0625, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64]
    assert charts.ratio_ticks(0.01, 3000)[:3] == [1 / 256, 1 / 64, 1 / 16] and 4096 in charts.ratio_ticks(0.01, 3000)


def test_small_ratios_are_not_cut(tmp_path):
    """Labels with many digits were shortened like coordinates, to 0.0."""
    path = tmp_path / "slow.jsonl"
    path.write_text(
        "".join(
            json.dumps(one) + "\n"
            for one in (
                sweeps.header(),
                *(
                    sweeps.line(case, {"commlib": [1.0] * 3, "mpi": [0.02] * 3})
                    for case in sweeps.write(tmp_path / "cases.jsonl")
                ),
            )
        )
    )
    labels = re.findall(r">([\d./]+)<", charts.svg(charts.groups(runs.read(path))[0]))
    assert labels[-9:] == ["1/64", "1/32", "1/16", "1/8", "0.25", "0.5", "1", "2", "4"]


def test_cases_of_fewer_than_three_rounds_are_not_in_the_summary(tmp_path):
    """One burst decided a mean."""
    short, usual = tmp_path / "short.jsonl", tmp_path / "usual.jsonl"
    sweeps.write(short, rounds=2)
    sweeps.write(usual)
    text = page.render([runs.read(short)])
    assert "8 of 8 cases have fewer than 3 rounds" in text and "geometric mean</div>" not in text
    text = page.render([runs.read(usual)])
    assert "fewer than 3 rounds" not in text and "<b>2.00</b>mpi / commlib, geometric mean</div>" in text
    assert compare.compare(runs.read(short), runs.read(usual)).mean is None
    lines = [json.loads(line) for line in usual.read_text().splitlines()]
    for name in ("commlib", "mpi"):
        lines[1]["row"]["seconds"][name] = lines[1]["row"]["seconds"][name][:2]
    lines[1]["row"]["seconds"]["mpi"] = [9.0, 9.0]  # a ratio that would be the mean
    usual.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page.render([runs.read(usual)])
    assert "1 of 8 cases has fewer than 3 rounds" in text and "<b>2.00</b>mpi / commlib, geometric mean</div>" in text


def test_many_cases_make_a_page_below_a_megabyte(tmp_path):
    path = tmp_path / "large.jsonl"
    verbs = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all"]
    plan = {
        "verbs": verbs,
        "dtypes": ["float32", "float16"],
        "ranks_per_node": [1, 2],
        "algorithms": ["auto", "direct"],
    }
    assert len(sweeps.write(path, plan=plan)) == 288
    text = page.render([runs.read(path)])
    assert len(text) < 1_000_000
    assert text.count("<figure>") == page.MOST_CHARTS and "24 more charts are left out here" in text


def test_two_runs_are_compared_beyond_their_noise(tmp_path):
    before, after = tmp_path / "before.jsonl", tmp_path / "after.jsonl"
    sweeps.write(before)
    sweeps.write(after, slower=1.5, plan={"sizes": ["4K", "16K"]})
    both = [runs.read(path) for path in (before, after)]
    comparison = compare.compare(*both)
    assert [pair.verdict for pair in comparison.pairs] == ["worse"] * 4  # 4K and the barrier, on two worlds
    assert comparison.mean == pytest.approx(1 / 1.5) and comparison.alone == (4, 2)
    table = Page(page.render(both)).tables["comparison"]
    assert table[1][6:10] == ["4K", "10.4 us", "15.6 us", "0.67"] and table[1][11] == "slower"


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([1.0, 1.1, 1.2], [0.8, 0.85, 0.9], "better"),
        ([1.0, 1.1, 1.2], [1.3, 1.4, 1.5], "worse"),
        ([1.0, 1.1, 1.2], [1.15, 1.2, 1.3], "same"),  # they overlap
        ([1.0, 1.0, 1.0], [1.02, 1.02, 1.02], "same"),  # sure, but small
        ([1.0, 1.1], [2.0, 2.1], "unknown"),
    ],
)
def test_differences_get_verdicts(tmp_path, before, after, verdict):
    case = sweeps.write(tmp_path / "x.jsonl")[0]
    path = tmp_path / "one.jsonl"
    entries = []
    for times in (before, after):
        path.write_text(
            "".join(json.dumps(one) + "\n" for one in (sweeps.header(), sweeps.line(case, {"commlib": times})))
        )
        entries += runs.read(path).entries
    assert compare.verdict(*(entry.seconds["commlib"] for entry in entries)) == verdict


def test_the_file_of_one_verb_is_read_as_well(tmp_path):
    path = tmp_path / "all_reduce.json"
    options = {"algorithm": "auto", "symmetric": True, "peers": ["mpi"]}
    rows = [row(size=size, in_place=True).figures() for size in (1 << 20, 2 << 20)]
    path.write_text(json.dumps({"facts": sweeps.FACTS, "options": options, "notes": ["a note"], "rows": rows}))
    run = runs.read(path)
    assert [entry.case.name for entry in run.entries] == [
        f"2x4 all_reduce float32 sum auto in-place symmetric {size}" for size in (1 << 20, 2 << 20)
    ]
    assert run.entries[0].share == 0.8 and run.entries[0].ratio("mpi") == 2.5
    assert "a note" in page.render([run])
    path.write_text("{}")
    with pytest.raises(BenchOptionsError, match="expected the JSON of"):
        runs.read(path)


def test_the_command_writes_page_and_pictures_without_mpi(sweep, tmp_path):
    out = tmp_path / "pages" / "r.html"
    program = "import sys\nsys.modules['mpi4py.MPI'] = None\nfrom commlib.cli.app import app\napp(sys.argv[1:])\n"
    command = ["bench", "report", str(sweep), "-o", str(out), "--png", str(tmp_path / "png")]
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"wrote {out}" in done.stdout and out.read_text().startswith("<!doctype html>")
    pictures = sorted((tmp_path / "png").iterdir())
    assert len(pictures) == 2 and all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_a_line_of_another_version_is_named(tmp_path):
    path = tmp_path / "old.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (sweeps.header(), {"kind": "case", "key": "x"})))
    with pytest.raises(
        BenchOptionsError, match=r"old.jsonl: a case lacks a field that this version needs: KeyError\('row'\)"
    ):
        runs.read(path)


def test_a_file_without_results_is_named(tmp_path):
    result = CliRunner().invoke(app, ["bench", "report", str(tmp_path / "none.jsonl")])
    assert result.exit_code == 2 and "cannot be read: No such file" in " ".join(result.output.split())
