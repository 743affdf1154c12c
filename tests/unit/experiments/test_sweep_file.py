"""The file of a sweep: what it may say, and what is said about its mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.refusals import refused

from apexrl.core.errors import ConfigError
from apexrl.experiments.sweep import Sweep, check_same, stored_sweep
from apexrl.experiments.sweep_file import as_text, read_sweep, sweep_from
from apexrl.run.sources import preset_dir

GOOD: dict[str, Any] = {
    "preset": "cartpole_ppo",
    "overrides": {"training.device": "cpu"},
    "space": {
        "algo.learning_rate": {"low": "1e-4", "high": 0.01, "log": True},
        "algo.num_epochs": {"low": 1, "high": 8},
        "algo.gamma": {"low": 0, "high": 1},
        "policy.hidden_dims": {"choices": [[8], [16, 16]]},
    },
}


def test_a_file_with_little_in_it() -> None:
    sweep = sweep_from(GOOD, "my.yaml")
    assert (sweep.trials, sweep.objective, sweep.direction, sweep.seeds) == (20, "return", "maximize", 1)
    rate, epochs, gamma, dims = sweep.space
    assert (rate.low, rate.high, rate.log, rate.is_integer) == (1e-4, 0.01, True, False)
    assert (epochs.is_integer, gamma.is_integer) == (True, False)
    assert dims.choices == ([8], [16, 16])
    config = sweep.config({"algo.learning_rate": 1e-05, "policy.hidden_dims": [16, 16]})
    assert config.to_dict()["algo"]["learning_rate"] == 1e-05
    assert config.to_dict()["policy"]["hidden_dims"] == [16, 16]
    assert config.training.device == "cpu"
    assert config.task.id == "CartPole-v1"


def test_what_a_directory_keeps_is_the_same_sweep() -> None:
    sweep = sweep_from(GOOD, "my.yaml")
    kept = yaml.safe_load(yaml.safe_dump(sweep.to_dict(), sort_keys=False))
    assert sweep_from(kept, "sweep.yaml") == sweep
    with refused(ConfigError, "sweep.yaml", "version", 2, 1, "Update apexrl"):
        sweep_from({**kept, "version": 2}, "sweep.yaml")


def test_choices_that_python_takes_for_equal_stay_apart(tmp_path: Path) -> None:
    choices = [True, 1, 1.0, "1", [1], [True], "[1]"]
    space = {"task.kwargs.x": {"choices": choices}, "task.kwargs.y": {"choices": [1, 2]}}
    file = sweep_from({**GOOD, "space": space, "sampler": "random"}, "my.yaml").with_trials(60)
    sweep = Sweep(file, tmp_path, print)
    jobs = [sweep.next_job() for _ in range(60)]
    assert sweep.next_job() is None
    drawn = [job.config["task"]["kwargs"] for job in jobs if job is not None]
    assert {as_text(kwargs["x"]) for kwargs in drawn} == {as_text(choice) for choice in choices}
    assert {kwargs["y"] for kwargs in drawn} == {1, 2}
    stored = stored_sweep(tmp_path)
    assert stored is not None
    check_same(file, stored, tmp_path)
    changed = sweep_from({**GOOD, "space": {**space, "task.kwargs.y": {"choices": [1.0, 2]}}, "sampler": "random"}, "x")
    with refused(ConfigError, tmp_path, "'space'", "--dir", "--resume"):
        check_same(changed, stored, tmp_path)


@pytest.mark.parametrize("value", [1e-05, 3, True, None, "text", "1e-5", [8, 8], {"a": 1.5}])
def test_a_value_as_text_is_read_back(value: Any) -> None:
    assert yaml.safe_load(as_text(value)) == value


@pytest.mark.parametrize("path", sorted((preset_dir() / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_sweeps_that_ship_are_found_by_name(path: Path) -> None:
    assert read_sweep(Path(path.stem)) == read_sweep(path)


SPACE = "algo.learning_rate"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"preset": None}, ["preset must be a string, got None"]),
        ({"preset": "cartpole"}, ["Unknown preset 'cartpole'", "Did you mean 'cartpole_ppo'?"]),
        ({"config": "x.yaml"}, ["give one of preset", "and config"]),
        ({"trails": 3}, ["Unknown field 'trails'", "Did you mean 'trials'?"]),
        ({"trials": 0}, ["trials must be an integer from 1 to 100000, got 0"]),
        ({"trials": "many"}, ["trials", "'many'"]),
        ({"seeds": 1.5}, ["seeds must be an integer", "1.5"]),
        ({"seed": -1}, ["seed must be an integer from 0", "-1"]),
        ({"direction": "up"}, ["direction must be one of maximize, minimize, got 'up'"]),
        ({"pruning": "medain"}, ["pruning must be one of none, median, halving", "Did you mean 'median'?"]),
        ({"sampler": "grid"}, ["sampler must be one of tpe, random, got 'grid'"]),
        ({"objective": 3}, ["objective must be", "got 3"]),
        ({"space": {}}, ["space must hold at least one field"]),
        ({"space": [1]}, ["space must hold fields and values, got [1]"]),
        ({"space": {"algo.clipp": {"low": 0, "high": 1}}}, ["space.algo.clipp", "Did you mean 'algo.clip_coef'?"]),
        ({"space": {SPACE: 3}}, ["space.algo.learning_rate must be {low: …, high: …}", "got 3"]),
        ({"space": {SPACE: {"low": 1}}}, ["space.algo.learning_rate must be", "{'low': 1}"]),
        ({"space": {SPACE: {"low": 1, "high": 2, "logg": True}}}, ["unknown 'logg'", "Did you mean 'log'?"]),
        ({"space": {SPACE: {"low": "x", "high": 2}}}, ["algo.learning_rate.low must be a finite number, got 'x'"]),
        ({"space": {SPACE: {"low": 2, "high": 1}}}, ["space.algo.learning_rate.low must be below high (1), got 2"]),
        ({"space": {SPACE: {"low": 0, "high": 1, "log": True}}}, ["low must be above 0 with log: true, got 0"]),
        ({"space": {SPACE: {"low": 0.1, "high": 1, "log": 2}}}, ["log must be true or false, got 2"]),
        ({"space": {SPACE: {"choices": [1]}}}, ["choices must be a list of two or more values, got [1]"]),
        ({"space": {"algo.num_epochs": {"low": 1.5, "high": 3}}}, ["algo.num_epochs counts", "1.5 and 3"]),
        ({"space": {"algo.clip_coef": {"low": 0.1, "high": 3.0}}}, ["space.algo.clip_coef: ", "in (0, 1)", "3.0"]),
        ({"space": {"algo.clip": {"low": 0.1, "high": 0.3}}}, ["algo.clip was renamed to algo.clip_coef."]),
        ({"space": {"training.seed": {"low": 0, "high": 3}}}, ["space.training.seed must not be searched", "seeds"]),
        ({"overrides": {"algo.lerning_rate": 1}}, ["'--algo.lerning_rate'", "Did you mean '--algo.learning_rate'?"]),
        ({"overrides": {"algo.clip_coef": 3}}, ["algo.clip_coef must be a number in (0, 1), got 3"]),
        ({"overrides": 3}, ["overrides must hold fields and values, got 3"]),
        ({"overrides": {"training.final_eval_episodes": 0}}, ["final_eval_episodes must be at least 1, got 0"]),
        (
            {"pruning": "median", "overrides": {"training.eval_interval": 0}},
            ["pruning median", "training.eval_interval must be at least 1, got 0", "pruning: none"],
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_field_and_value(change: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep_from({**GOOD, **change}, "my.yaml")
    for part in ("my.yaml: ", *expected):
        assert part in str(caught.value)


def test_every_problem_of_the_space_is_named_at_once() -> None:
    space = {"algo.clip_coef": {"low": 2, "high": 1}, "algo.gamma": 3}
    with refused(ConfigError, "my.yaml", "trials", "space.algo.clip_coef", "space.algo.gamma"):
        sweep_from({**GOOD, "trials": 0, "space": space}, "my.yaml")


def test_a_file_that_is_not_there_is_named() -> None:
    with refused(ConfigError, "nowhere.yaml", "cartpole"):
        read_sweep(Path("nowhere.yaml"))


def test_what_only_a_directory_keeps_is_unknown_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: cartpole_ppo\nspace: {algo.learning_rate: {low: 1.0e-4, high: 1.0e-2}}\n")
    with refused(ConfigError, file, "field 'base'", "preset"):
        read_sweep(file)
