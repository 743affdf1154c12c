"""``apexrl manifest``, ``apexrl eval --manifest`` and ``apexrl compare`` as users meet them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import apexrl
from apexrl.cli.main import main

pytestmark = pytest.mark.slow

TRAIN = [
    "--task.num_envs", "8",
    "--policy.hidden_dims", "[16]",
    "--algo.num_steps", "32",
    "--training.eval_num_envs", "3",
    "--training.final_eval_episodes", "0",
    "--training.device", "cpu",
    "--features.save_video", "false",
    "--features.save_plot", "false",
]  # fmt: skip
OPTIONS = ["--task.kwargs.max_episode_steps", "60"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run that has learned nothing, one that has learned something, and manifests."""
    directory = tmp_path_factory.mktemp("manifests")
    for name, steps in (("new", "256"), ("old", "4096")):
        words = ["train", "cartpole_ppo", "--run-dir", str(directory / name), *TRAIN, *OPTIONS]
        assert main([*words, "--training.total_timesteps", steps, "--algo.learning_rate", "0.003"]) == 0
    assert main(["manifest", str(directory / "old"), "--episodes", "12", "--output", str(directory / "m.json")]) == 0
    return directory


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_results_are_the_same_for_1_3_and_32_environments(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for num_envs in ("1", "3", "32"):
        output = place / f"r{num_envs}.json"
        words = ["--manifest", str(place / "m.json"), "--num-envs", num_envs, "--output", str(output)]
        assert main(["eval", str(place / "old"), *words]) == 0
        found.append(read(output))
    shown = capsys.readouterr().out
    assert "over 12 episodes" in shown
    assert f"Results: {place / 'r32.json'}" in shown
    for other in found[1:]:
        assert other["episodes"] == found[0]["episodes"]
        assert other["summary"] == found[0]["summary"]
    assert [content["run"]["num_envs"] for content in found] == [1, 3, 32]


def test_a_file_of_results_says_all_that_is_needed_to_repeat_it(place: Path) -> None:
    output = place / "deep" / "results.json"
    assert main(["eval", str(place / "old"), "--manifest", str(place / "m.json"), "--output", str(output)]) == 0
    content, manifest = read(output), read(place / "m.json")
    (checkpoint,) = sorted((place / "old" / "checkpoints").glob("*.pt"))[-1:]
    assert content["checkpoint"] == {
        "path": str(checkpoint),
        "sha256": hashlib.sha256(checkpoint.read_bytes()).hexdigest(),
    }
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    assert content["manifest_hash"] == hashlib.sha256(canonical.encode()).hexdigest()
    assert content["command"] == f"apexrl eval {checkpoint} --manifest {place / 'm.json'}"
    assert content["versions"]["apexrl"] == apexrl.__version__
    assert content["versions"].keys() >= {"python", "torch", "numpy", "gymnasium", "mujoco"}
    assert content["task"] == "CartPole-v1"
    assert content["options"] == {"max_episode_steps": 60}
    # CartPole gives 1 a step, and its limit here is 60 steps.
    rows = content["episodes"]
    assert [row["seed"] for row in rows] == [episode["seed"] for episode in manifest["episodes"]]
    assert [row["episode"] for row in rows] == list(range(12))
    assert all(row["return"] == row["length"] for row in rows)
    assert all(row["truncated"] == (row["length"] == 60) for row in rows)
    summary = content["summary"]
    assert summary["return"] == pytest.approx(sum(row["return"] for row in rows) / 12)
    low, high = summary["return_interval"]
    assert low <= summary["return"] <= high
    assert summary["truncated"] == pytest.approx(sum(row["truncated"] for row in rows) / 12)
    assert sorted(path.name for path in output.parent.iterdir()) == ["results.json"], "no temporary file stays"


def test_compare_finds_a_real_difference_and_none_where_there_is_none(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = place / "comparison.json"
    words = ["--manifest", str(place / "m.json"), "--output", str(output)]
    assert main(["compare", str(place / "new"), str(place / "old"), *words]) == 0
    assert "The difference is statistically significant: B has a higher return" in capsys.readouterr().out
    content = read(output)
    assert content["difference_is_real"] is True
    assert content["return"]["p_value"] < 0.05
    assert 0 < content["return"]["interval"][0] < content["return"]["difference"]
    assert content["manifest_hash"]
    assert content["versions"]["torch"]
    assert content["command"].startswith("apexrl compare ")

    assert main(["compare", str(place / "old"), str(place / "old"), "--episodes", "3"]) == 0
    assert "No significant difference: A and B did the same in each of 3 paired episodes." in capsys.readouterr().out


def test_compare_takes_files_of_results(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [place / f"{name}-results.json" for name in ("new", "old")]
    for name, file in zip(("new", "old"), files, strict=True):
        assert main(["eval", str(place / name), "--manifest", str(place / "m.json"), "--output", str(file)]) == 0
    capsys.readouterr()
    assert main(["compare", str(files[0]), str(files[1])]) == 0
    from_files = capsys.readouterr().out
    assert "The difference is statistically significant" in from_files
    assert main(["compare", str(place / "new"), str(files[1]), "--manifest", str(place / "m.json")]) == 0
    assert capsys.readouterr().out == from_files


def test_a_policy_can_be_tried_with_other_options_than_it_was_trained_with(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = place / "longer.json"
    words = ["manifest", "CartPole-v1", "--episodes", "2", "--task.kwargs.max_episode_steps", "80"]
    assert main([*words, "--output", str(longer)]) == 0
    assert main(["eval", str(place / "old"), "--manifest", str(longer), "--output", str(place / "l.json")]) == 0
    assert "was trained with task options {'max_episode_steps': 60}; the manifest has" in capsys.readouterr().out
    assert max(row["length"] for row in read(place / "l.json")["episodes"]) > 60


def test_wrong_inputs_give_one_message(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lift, other, results = place / "lift.json", place / "other.json", place / "r.json"
    run, manifest = str(place / "old"), str(place / "m.json")
    assert main(["manifest", "lift", "--episodes", "2", "--output", str(lift)]) == 0
    assert main(["manifest", run, "--episodes", "2", "--seed", "9", "--output", str(other)]) == 0
    assert main(["eval", run, "--manifest", manifest, "--output", str(results)]) == 0
    damaged = place / "damaged.json"
    damaged.write_text(json.dumps({**read(results), "episodes": [{"episode": 0}]}), encoding="utf-8")
    option = place / "option.json"
    option.write_text(json.dumps({**read(place / "m.json"), "options": {"nonsense": 1}}), encoding="utf-8")
    capsys.readouterr()
    wrong = {
        f"{lift}: The manifest is of the task 'lift', the policy was": ["eval", run, "--manifest", str(lift)],
        f"{option}: task.id CartPole-v1: Could not make": ["eval", run, "--manifest", str(option)],
        f"{option}: task.id CartPole-v1: Could not": ["compare", run, run, "--manifest", str(option)],
        "is not a manifest": ["eval", run, "--manifest", str(results)],
        "There is no manifest at": ["eval", run, "--manifest", "nowhere.json"],
        "leave --seed out": ["eval", run, "--manifest", manifest, "--seed", "0"],
        "leave --stochastic out": ["eval", run, "--manifest", manifest, "--stochastic"],
        "--output needs --manifest": ["eval", run, "--output", "x.json"],
        "is a directory; name a file": ["eval", run, "--manifest", manifest, "--output", str(place)],
        "--device 'nonsense' cannot be used": ["eval", run, "--manifest", manifest, "--device", "nonsense"],
        "There is no environment 'nonsense'": ["manifest", "nonsense", "--output", "x.json"],
        "arguments are required: --output": ["manifest", "lift"],
        "takes fields of task alone": ["manifest", "lift", "--algo.gamma", "0.9", "--output", "x.json"],
        "unexpected keyword argument 'x'": ["manifest", run, "--task.kwargs.x", "1", "--output", str(other)],
        "not on that of A": ["compare", str(results), str(place / "of_other.json")],
        "was evaluated on the manifest": ["compare", str(results), run, "--manifest", str(other)],
        "give --manifest FILE": ["compare", str(results), run],
        "leave --episodes and --seed out": ["compare", run, run, "--manifest", manifest, "--episodes", "3"],
        "is not a file of results": ["compare", manifest, run, "--manifest", manifest],
        "is damaged": ["compare", str(damaged), run, "--manifest", manifest],
        "There is no checkpoint at": ["compare", run, "nowhere"],
    }
    assert main(["eval", run, "--manifest", str(other), "--output", str(place / "of_other.json")]) == 0
    capsys.readouterr()
    for message, words in wrong.items():
        assert main(words) == 2, words
        error = capsys.readouterr().err
        assert message in error, words
        assert error.count("\n") == 1, "one message"


def test_policies_of_different_tasks_are_not_compared(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "lift_ppo", "--run-dir", str(place / "lift"), *TRAIN, "--training.total_timesteps", "256"]
    assert main(words) == 0
    capsys.readouterr()
    assert main(["compare", str(place / "old"), str(place / "lift")]) == 2
    assert "A is of the task 'CartPole-v1', B of 'lift'" in capsys.readouterr().err
