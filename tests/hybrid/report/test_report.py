"""The report of a run: it shows what the folder holds, escapes it, and bad input is one line."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from answers import assert_one_line

from hybrid.report import write
from hybrid.report.curves import RUN, Group, curves
from hybrid.report.page import amount
from hybrid.report.records import MetricsLine, RunRecord, complete
from hybrid.training import restore

HOSTILE = "</td><script>alert('$\\frac$')</script>\ud800"


@pytest.fixture
def by_hand(tmp_path):
    """The smallest run folder there is."""
    _lines(tmp_path, {"step": 1, "epoch": 0, "phase": "serial", "loss": 2.0})
    return tmp_path


def _lines(run, *lines):
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class Page(HTMLParser):
    """The tags of a page, its text, and its table rows by their first cell."""

    def __init__(self, file):
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.charts: list[str] = []
        self.text = ""
        self._cells: list[list[str]] = []
        self.feed(file.read_text())
        cells = [[cell.strip() for cell in row] for row in self._cells]
        self.rows = {row[0]: row[1:] for row in cells}

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        self.charts += [value or "" for name, value in attrs if name == "aria-label"]
        if tag == "tr":
            self._cells.append([])
        elif tag in ("td", "th"):
            self._cells[-1].append("")

    def handle_data(self, data):
        self.text += data
        if self.tags[-1:] in (["td"], ["th"]):
            self._cells[-1][-1] += data


def test_a_trained_run_is_reported_in_full_and_stands_alone(hybrid, run_folder):
    status, out, err = hybrid("report", run_folder)
    assert (status, err) == (0, "")
    assert out == f"wrote {run_folder / 'report' / 'index.html'}\n"
    page = Page(run_folder / "report" / "index.html")
    summary = json.loads((run_folder / "summary.json").read_text())
    assert page.rows["test accuracy"] == [f"{summary['test_accuracy']:.2%}"]
    assert page.rows["solver"] == ["ddg"]
    assert page.rows["blocks"] == ["2"]
    # the row of cut 1 comes after that of rank 1
    assert page.rows["1"] == [summary["cuts"][0], f"{summary['residual'][0]:.3g}"]
    sent, peak = summary["bytes_sent"][0], summary["peak_memory_bytes"][0]
    idle, steps = f"{summary['idle_share'][0]:.1%}", f"{summary['local_samples'][0]:,}"
    assert page.rows["0"] == [idle, amount(sent), amount(peak), steps, "0.5 steps"]
    assert page.links == []
    assert [chart.split(" ")[0] for chart in page.charts] == [
        *("Loss,", "Loss,", "Accuracy,", "Accuracy,", "Relative", "Throughput", "Idle"),
    ]
    assert page.tags.count("svg") == len(page.charts)
    assert page.rows["train.epochs"] == ["2", "12"]
    document = (run_folder / "report" / "index.html").read_bytes()
    # nothing is fetched and no script runs
    assert b"default-src 'none'; style-src 'unsafe-inline'\"" in document
    assert "script" not in page.tags
    assert len(document) < 1e6
    assert "has not ended" not in page.text
    assert [p.name for p in (run_folder / "report").iterdir()] == ["index.html"]


def test_a_run_that_was_killed_is_reported_up_to_its_last_whole_line(hybrid, run_folder):
    (run_folder / "summary.json").unlink()
    lines = (run_folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_folder / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:9])
    assert hybrid("report", run_folder)[0] == 0
    page = Page(run_folder / "report" / "index.html")
    assert "has not ended" in page.text
    assert f"step {json.loads(lines[1])['step']}, after 0 of 2 epochs" in page.text
    assert page.rows["model"] == ["resnet8"]
    assert "test accuracy" not in page.rows
    assert page.rows["1"][1] == f"{json.loads(lines[1])['residual'][0]:.3g}"


def test_hostile_names_are_text(by_hand):
    (by_hand / "summary.json").write_text(
        json.dumps({"solver": HOSTILE, "model": HOSTILE, "cuts": [HOSTILE], "residual": [0.5]})
    )
    line = {"step": 1, "epoch": 0, "phase": "parallel", "loss": 2.0, "residual": [0.5]}
    _lines(by_hand, line, line | {"phase": HOSTILE})
    (by_hand / "config.toml").write_text("# of the library: cuts = ['3']\n")
    page = Page(write(by_hand))
    assert "script" not in page.tags
    assert page.rows["1"][0].startswith(HOSTILE[:-1])


def drawn_of(*lines):
    """Title -> chart."""
    found = curves(RUN, [Group("", [RunRecord(Path(), None, complete({}), False, [*lines])])])
    return {title.partition(",")[0]: chart for title, chart in found}


def heights(chart):
    return [list(line.get_ydata()) for line in chart.axes.lines]


def test_long_runs_and_many_ranks_stay_small_pages():
    many = [n / 1e3 for n in range(200)]
    drawn = drawn_of(
        *(MetricsLine(step=n, epoch=0, phase="serial", loss=1.0, idle=many) for n in range(1, 2000))
    )
    (loss,) = drawn["Loss"].axes.lines
    assert 250 < len(loss.get_xdata()) <= 500
    assert (loss.get_marker(), drawn["Idle share of each rank"].axes.get_xlabel()) == ("", "steps")
    idle = drawn["Idle share of each rank"]
    assert [label for _, label in idle.keys] == ["least", "greatest"]
    assert [ys[0] for ys in heights(idle)] == pytest.approx([0, 19.9])
    assert sum(len(chart.svg()) for chart in drawn.values()) < 200_000


def test_curves_are_drawn_of_what_the_lines_hold():
    serial = MetricsLine(step=4, epoch=1, phase="serial", loss=2.0)
    parallel = MetricsLine(step=4, epoch=1, phase="parallel", loss=2.0, residual=[0.1, 0.0])
    tested = MetricsLine(step=8, epoch=2, phase="test", test_accuracy=0.5)
    zeros = parallel.model_copy(update={"residual": [0.0, float("nan")]})
    assert list(drawn_of(serial, zeros)) == ["Loss"]
    assert [label for _, label in drawn_of(serial)["Loss"].keys] == ["training"]
    timed = {"samples": 10, "seconds": 2.0, "idle": [0.5, 0.25]}
    drawn = drawn_of(serial.model_copy(update=timed), parallel, tested)
    assert [label for _, label in drawn["Loss"].keys] == ["serial", "parallel"]
    names = ["Loss", "Accuracy", "Relative", "Throughput", "Idle"]
    assert [title.split()[0] for title in drawn] == names
    assert heights(drawn["Throughput"]) == [[5.0]]
    assert heights(drawn["Idle share of each rank"]) == [[50.0], [25.0]]
    (residual,) = drawn["Relative primal residual ‖λ - x‖ / ‖x‖ at each cut"].axes.lines
    assert (list(residual.get_xdata()), list(residual.get_ydata())) == ([1.0], [0.1])  # of epoch 1


@pytest.mark.parametrize(
    ("file", "content", "parts"),
    [
        ("metrics.jsonl", None, ("not a run folder", "--out")),
        ("metrics.jsonl", '{"step": 1', ("0 whole lines",)),
        ("metrics.jsonl", "{}\n{}\n", ("metrics.jsonl line 1", "step", "remove it")),
        ("metrics.jsonl", "nothing\n", ("line 1", "not a JSON object", "correct it")),
        ("metrics.jsonl", "[" * 100000 + "\n", ("line 1", "not a JSON object")),
        ("summary.json", "[1]", ("summary.json", "a list")),
        ("summary.json", f'{{"bytes_sent": [{10**400}]}}', ("summary.json", "bytes_sent")),
        ("summary.json", '{"residual": 3}', ("summary.json", "residual is 3", "list")),
        ("summary.json", b"\xff\xfe\xff", ("summary.json", "not a JSON object")),
        ("config.toml", "[model]\nnam = 1", ("config.toml", "model.nam", "model.name")),
        ("report", "a file", ("report", "where a folder must be", "remove it")),
    ],
)
def test_bad_input_is_one_line_with_a_remedy(hybrid, by_hand, file, content, parts):
    (by_hand / file).unlink(missing_ok=True)
    if content is not None:
        raw = content if isinstance(content, bytes) else content.encode()
        (by_hand / file).write_bytes(raw)
    assert_one_line(hybrid("report", by_hand), *parts)
    assert not (by_hand / "report").is_dir()


def test_settings_that_are_not_of_the_checkpoint_are_said_so(run_folder):
    path = run_folder / "config.toml"
    path.write_text(path.read_text().replace('"resnet8"', '"resnet14"'))
    with pytest.raises(ValueError, match=r"config\.toml.*put back"):
        restore.restore(run_folder)


def test_local_steps_in_waits_stand_in_place_of_a_parallel_phase_that_there_was_not(by_hand):
    known = {"idle_share": [0.5, 0.25], "train_seconds": 10.0, "serial_seconds": 10.0}
    known["links"] = "virtual"
    gaps = {"parallel_seconds": 0.0, "fill": "penalty", "local_samples": [16, 0]}
    (by_hand / "summary.json").write_text(json.dumps(known | gaps))
    rows, name = Page(write(by_hand)).rows, "penalty, local samples per tick"
    assert not {"of which serial", "of which parallel"} & {*rows}  # all of it was serial
    assert [rows[row][-1] for row in ("rank", "0", "1")] == [name, "16", "0"]
    none = {"parallel_seconds": 4.0, "serial_seconds": 6.0, "fill": "none"}
    (by_hand / "summary.json").write_text(json.dumps(known | none))
    rows = Page(write(by_hand)).rows
    assert (rows["of which serial"], rows["of which parallel"]) == (
        *(["6.0 s, simulated"], ["4.0 s, simulated"]),
    )
    assert name not in rows["rank"]


def test_under_mpirun_only_the_first_rank_writes(hybrid, by_hand, monkeypatch):
    monkeypatch.setattr("hybrid.ranks.launch.launched_rank", lambda: 1)
    assert hybrid("report", by_hand) == (0, "", "")
    assert not (by_hand / "report").exists()
