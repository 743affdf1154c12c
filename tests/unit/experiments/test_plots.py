"""Learning curves of runs whose files are damaged: what can be read is drawn, and the rest is named."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from apexrl.cli.main import main
from apexrl.experiments import plots
from apexrl.experiments.seeds import SeedRun, SeedRuns
from apexrl.run.records import read_log

FILES = ("metrics.jsonl", "evaluations.jsonl")
WRONG: tuple[Any, ...] = (
    "high", None, True, [0.5], {"a": {"b": 1}}, math.nan, math.inf, 1e300, -1e99, 10**400, 2**63, "\ud800\n", [], -3,
)  # fmt: skip
TINY = {
    "task.id": "cartpole", "task.num_envs": "4", "policy.hidden_dims": "[4]", "algo.num_steps": "32",
    "algo.num_epochs": "1", "training.total_timesteps": "768", "training.eval_interval": "2",
    "training.eval_episodes": "2", "training.eval_num_envs": "2", "training.final_eval_episodes": "0",
    "training.device": "cpu", "features.save_video": "false", "features.save_plot": "false",
    "logging.tensorboard": "false",
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("plots") / "run"
    words = [word for name, value in TINY.items() for word in (f"--{name}", value)]
    assert main(["train", "cartpole_ppo", "--run-dir", str(run_dir), *words]) == 0
    return run_dir


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copy what the run has logged into a directory of a name."""

    def copy(name: str) -> Path:
        (tmp_path / name).mkdir()
        for file in (*FILES, "config.yaml"):
            shutil.copy(trained / file, tmp_path / name)
        return tmp_path / name

    return copy


def cut(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def garble(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 30)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    path.write_bytes(content)


def replace_by_noise(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(rng.choice((0, 1, 3000))))


def put_wrong_lines(path: Path, rng: random.Random) -> None:
    lines = path.read_text().splitlines()
    text = rng.choice(["", "no JSON", "3", "null", "[]", "{}", "[" * 5000, '{"return": ' + "[" * 960 + "]" * 960 + "}"])
    lines.insert(rng.randrange(len(lines) + 1), text)
    path.write_text("\n".join(lines))


def put_wrong_values(path: Path, rng: random.Random) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for _ in range(rng.randint(1, 8)):
        record = rng.choice(records)
        name = rng.choice([*record, "rollout/success_rate", "success_rate", "return_interval", "per_task", "\ud800\n"])
        if rng.random() < 0.2:
            record.pop(name, None)
        else:
            record[name] = [rng.choice(WRONG), rng.choice(WRONG)] if rng.random() < 0.3 else rng.choice(WRONG)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_directory(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


SMALL = (put_wrong_lines, put_wrong_values)
"""Damages that leave enough of every seed for a curve of them all."""
DAMAGES = (cut, garble, replace_by_noise, *SMALL, make_directory)


@pytest.mark.parametrize("seed", range(3))
def test_no_damage_stops_a_plot(
    copied: Callable[[str], Path], tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    damaged = []
    for index in range(24):
        path = copied(f"{index}-{seed}")
        for file in rng.choice([FILES, FILES[:1], FILES[1:]]):
            rng.choice(DAMAGES if index < 12 else SMALL)(path / file, rng)
        damaged.append(path)
    # The first half as runs of their own, the second as the seeds of one.
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    for index, path in enumerate(damaged[12:]):
        path.rename(seeds / f"seed-{index}")
    SeedRuns(seeds, {}, [SeedRun(index) for index in range(12)]).write()
    output = tmp_path / "all.png"
    assert main(["plot", *map(str, damaged[:12]), str(seeds), "--output", str(output)]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) > 12
    for note in notes:
        assert note.startswith(f"apexrl: {tmp_path}/")
        assert note.endswith("left out.") or "; left out " in note
        assert any(name in note for name in FILES)
        assert len(note) < 400
    with Image.open(output) as image:
        assert image.width > 500


@pytest.mark.parametrize(
    ("file", "damage", "note"),
    [
        ("metrics.jsonl", lambda text: text[:-9], "1 of 6 lines are damaged or cut off; left out."),
        ("metrics.jsonl", lambda text: f"no JSON\n[3]\n{text}", "2 of 8 lines are damaged or cut off; left out."),
        (
            "metrics.jsonl",
            lambda text: text.replace('"total_steps": 768', '"total_steps": "x"'),
            "'total_steps' must be a number up to 1e+100, got \"x\"; left out.",
        ),
        (
            "evaluations.jsonl",
            lambda text: text.replace('"step": 768', '"step": [768]'),
            "'step' must be a count, got [768]; left out.",
        ),
        (
            "evaluations.jsonl",
            lambda text: text.replace('"return": ', '"return": "', 1).replace(', "return_i', '", "return_i', 1),
            "'return' must be a number up to 1e+100, got ",
        ),
    ],
)
def test_what_is_damaged_is_named_and_the_rest_is_drawn(
    copied: Callable[[str], Path], file: str, damage: Callable[[str], str], note: str
) -> None:
    path = copied("run")
    whole = read_log(path, [])
    (path / file).write_text(damage((path / file).read_text()))
    notes: list[str] = []
    plots.plot_runs([path], path / "curve.png", notes.append)
    (told,) = notes
    assert told.startswith(f"{path / file}: {note}")
    log = read_log(path, [])
    lost = (
        len(whole.trained("rollout/return")) - len(log.trained("rollout/return")),
        len(whole.evaluated("return")) - len(log.evaluated("return")),
    )
    expected = 0 if "of 8" in note else 1
    assert lost == ((expected, 0) if file == "metrics.jsonl" else (0, expected))


def test_a_run_of_which_nothing_can_be_read_is_named(
    copied: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied("run")
    (path / "evaluations.jsonl").unlink()
    (path / "evaluations.jsonl").mkdir()
    (path / "metrics.jsonl").write_bytes(b"\x00\xff")
    assert main(["plot", str(path)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"apexrl: {path}/metrics.jsonl: 1 of 1 lines are damaged or cut off; left out.",
        f"apexrl: {path}/evaluations.jsonl cannot be read: Is a directory; left out.",
        f"apexrl: Nothing to plot yet in {path}: no episode has ended.",
    ]


def test_only_what_is_drawn_is_looked_at(copied: Callable[[str], Path]) -> None:
    path = copied("run")
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(text.replace('"train/loss": ', '"train/loss": null, "x": '))
    notes: list[str] = []
    plots.plot_runs([path], path / "curve.svg", notes.append)
    assert notes == []
