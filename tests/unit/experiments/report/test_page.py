"""The page that comes of run directories: what it says, what it leaves out, and what it never does."""

from __future__ import annotations

import json
import re
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from tests.unit.experiments.report.test_runs import evaluate_run, groups_of, make_run

from apexrl.cli.main import main
from apexrl.collectors.init_states import RolloutStats
from apexrl.experiments.report import page, write_report
from apexrl.experiments.report.figures import MAX_POINTS

EVIL = "<script>alert(1)</script><u>\"'&"


class Reader(HTMLParser):
    """Collects the text and the elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._is_script = False
        self.feed(text)
        self.data: Any = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._is_script = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._is_script = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._is_script else f"{data} "

    def has(self, text: str) -> bool:
        return text in " ".join(self.text.split())


def report(*paths: Path) -> Reader:
    return Reader(write_report(paths, paths[0].parent / "report.html").read_text(encoding="utf-8"))


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A run on a suite with evaluations, statistics of init states and a video that is none."""
    path = make_run(tmp_path / "suite", algo__rloo_batch_size=2, algo__name="rloo", task__benchmark_name="mt10")
    evaluate_run(path, 400, **{"return": [0.0] * 4}, success_once=[1.0, 0.0, 1.0, 1.0], task_id=[0.0, 0.0, 1.0, 1.0])
    stats = RolloutStats(path / "rollout_stats.json")
    for state, outcomes in {"a": (1, 0, 1, 1), "b": (0, 0), "c": (1, 1)}.items():
        stats.record(state * 64, map(bool, outcomes), "push" if state == "c" else "reach")
    stats.write()
    (path / "video.mp4").write_bytes(b"video")
    return path


def test_the_command_writes_the_page_and_says_its_size(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(suite)]) == 0
    assert re.fullmatch(rf"{suite}/report.html \(\d\.\d MB\)\n", capsys.readouterr().out)
    # plotly.js is 4.8 MB; compressed, the whole page is less than half of that.
    assert (suite / "report.html").stat().st_size < 2.3 * 2**20


def test_the_page_shows_results_tasks_states_video_and_commands(suite: Path) -> None:
    found = report(suite)
    assert found.has("75.0 % 30.1 to 95.4 %")  # Wilson's interval of 3 of 4
    assert found.has("2 of 3 states mastered (the last 2 rollouts succeeded)")
    assert found.has(f"apexrl train {suite}/config.yaml --run-dir {suite}-again")
    assert found.has(f"apexrl eval {suite} --episodes 4")
    assert found.has(f"apexrl play {suite}")
    assert ("video", "data:video/mp4;base64,dmlkZW8=") in [(tag, entry.get("src")) for tag, entry in found.tags]
    maps = [figure for figure in found.data["figures"].values() if figure["data"][0]["type"] == "heatmap"]
    assert maps[0]["data"][0]["y"] == ["push", "reach"]
    assert maps[0]["data"][0]["z"] == [[1.0, None], [0.75, 0.0]]
    bars = [figure for figure in found.data["figures"].values() if figure["data"][0].get("error_x")]
    assert dict(zip(bars[0]["data"][0]["y"], bars[0]["data"][0]["x"], strict=True)) == {"reach": 0.5, "push": 1.0}


def test_every_plot_is_one_that_plotly_knows(suite: Path, tmp_path: Path) -> None:
    figures = report(suite, make_run(tmp_path / "a-0"), make_run(tmp_path / "a-1", 1)).data["figures"]
    assert len(figures) >= 4
    for figure in figures.values():
        go.Figure(figure)  # raises for an unknown field or an impossible value


def test_only_fields_that_differ_are_compared(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", seed=3, algo__learning_rate=0.5, task__num_envs=8)
    assert page.differences(groups_of(tmp_path / "a", tmp_path / "b")) == [
        ("algo.learning_rate", ["0.001", "0.5"]),
        ("task.num_envs", [None, "8"]),
    ]


def test_a_page_about_almost_nothing_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").write_text("")
    found = report(path)
    for text in (
        "no config.yaml, so no command can repeat it.",
        "no training has been logged yet.",
        "no evaluation yet",
        "No run has been evaluated yet.",
        "No episode has ended yet.",
        "No run has a video",
        "No times have been logged yet.",
        "It has no readable config.yaml.",
    ):
        assert found.has(text), text


def test_a_note_says_that_few_seeds_give_unreliable_intervals(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run-{seed}", seed=seed) for seed in range(5)]
    note = "seeds are unreliable: use at least 5 seeds."
    assert report(*runs[:4]).has(f"The intervals of 4 {note}")
    assert not report(*runs).has(note)
    assert not report(runs[0]).has(note)


@pytest.mark.filterwarnings("error", "ignore::apexrl.core.errors.FewSamplesWarning")
def test_numbers_at_the_edge_and_half_a_character_still_give_a_page(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", task__id="\ud800")
    evaluate_run(path, 400, **{"return": [1.0, 3.0]})
    lines = (path / "metrics.jsonl").read_text()
    for fps in ("1e-320", "1e308", "1e-99"):
        (path / "metrics.jsonl").write_text(lines.replace('"time/fps": 50.0', f'"time/fps": {fps}'))
        found = report(path, make_run(tmp_path / f"other {fps}"))
        assert found.has("2 runs of 2 configurations on ?, lift.")


def test_names_from_run_directories_are_text(tmp_path: Path) -> None:
    # A directory's name cannot hold a slash.
    path = make_run(tmp_path / EVIL.replace("/", ""), task__id=EVIL, algo__name=EVIL)
    lines = (path / "metrics.jsonl").read_text().replace("rollout/return", "rollout/<img src=x>")
    (path / "metrics.jsonl").write_text(lines)
    evaluate_run(path, 400, task_id=[0.0], **{"return": [1.0], "success_once": [1.0]})
    text = (path / "evaluations.jsonl").read_text().replace('"reach"', json.dumps(EVIL))
    (path / "evaluations.jsonl").write_text(text)
    (path / "<u>.mp4").write_bytes(b"x")
    found = report(path, make_run(tmp_path / "other"))
    assert [tag for tag, _ in found.tags].count("script") == 3
    assert not {"u", "img"} & {tag for tag, _ in found.tags}
    assert found.has(EVIL)
    drawn = json.dumps(found.data["figures"])
    assert "&lt;script&gt;" in drawn
    assert "<" not in drawn.replace("<extra></extra>", "")


def test_colours_stand_out_from_their_background_in_both_schemes() -> None:
    css = (Path(page.__file__).parent / "page.css").read_text()
    pairs = {name: colors for name, *colors in re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", css)}

    def luminance(color: str) -> float:
        parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for scheme in (0, 1):
        card = luminance(pairs["card"][scheme])
        # As WCAG asks: 4.5 for text, 3 for lines.
        for name, least in {"text": 4.5, "soft": 4.5, "accent": 4.5, **{f"c{i}": 3 for i in range(8)}}.items():
            darker, lighter = sorted((card, luminance(pairs[name][scheme])))
            assert (lighter + 0.05) / (darker + 0.05) >= least, name


def test_a_large_video_is_named_instead_of_shown(suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_VIDEO_BYTES", 4)
    found = report(suite)
    assert found.has("Not shown: the file has 0 MB.")
    assert "video" not in [tag for tag, _ in found.tags]


def test_a_long_run_is_thinned_out(tmp_path: Path) -> None:
    path = make_run(tmp_path / "long", lines=0, training__total_timesteps=100_000)
    names = [f"train/number_{index}" for index in range(3)]
    with (path / "metrics.jsonl").open("w") as file:
        for index in range(1, 100_001):
            numbers = dict.fromkeys(names, index / 7)
            file.write(json.dumps({"iteration": index, "total_steps": index, "rollout/return": 1.0, **numbers}) + "\n")
    began = time.perf_counter()
    found = report(path)
    assert time.perf_counter() - began < 60  # 2 s on an idle core
    lengths = [len(trace["x"]) for figure in found.data["figures"].values() for trace in figure["data"]]
    assert len(lengths) == 4
    assert max(lengths) == MAX_POINTS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{dir}/none"], "is not a run directory: it does not exist"),
        (["{dir}/empty"], "is not a run directory: it has neither config.yaml nor metrics.jsonl"),
        (["{dir}/run", "{dir}/empty"], "empty is not a run directory"),
        (["{dir}/run", "--output", "{dir}/page.pdf"], "must end in .html"),
        (["{dir}/run", "--output", "{dir}/run/config.yaml/page.html"], "cannot be written"),
        (["{dir}/run", "--output", "{dir}/page.html"], "is a directory; name a file"),
        ([], "required: RUN_DIR"),
    ],
)
def test_a_problem_is_one_message(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "page.html").mkdir()
    assert main(["report", *(word.format(dir=tmp_path) for word in words)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_without_plotly_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert main(["report", str(make_run(tmp_path / "run"))]) == 2
    assert capsys.readouterr().err == "apexrl: apexrl report needs plotly: pip install 'apexrl[report]'.\n"
