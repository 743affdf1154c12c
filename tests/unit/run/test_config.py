"""The schema: what it accepts, what it refuses, and what it says then."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.refusals import REFUSALS, Refusal, refused

import apexrl
from apexrl.algorithms import PPOConfig
from apexrl.cli.main import main
from apexrl.core.errors import ConfigError, EnvError
from apexrl.core.metrics import MetricSpec
from apexrl.core.validation import field_help
from apexrl.policies import VLAPolicy
from apexrl.policies.config import PolicyConfig, VLAConfig
from apexrl.policies.networks.mlp import ActionHead
from apexrl.policies.vla.flow import FlowHead
from apexrl.policies.vla.likelihood import LikelihoodHead
from apexrl.policies.vla.policy import FREEZABLE
from apexrl.run.config import CONFIG_SECTIONS, Config, field_paths, make_config
from apexrl.run.loading import load_config, with_overrides
from apexrl.run.sources import parse_yaml, preset_names, preset_summary, read_source
from apexrl.run.tasks import TaskConfig

PRESETS = ["cartpole_ppo", "halfcheetah_ppo", "hopper_ppo", "lift_ppo", "pendulum_ppo", "walker2d_ppo", "walker_ppo"]
VLA = {"kind": "vla"}
SUITE = {"task": {"benchmark_name": "mt10"}, "algo": {"name": "rloo"}}
SOURCES = sorted(Path(apexrl.__file__).parent.rglob("*.py"))


def written(directory: Path, config: Config) -> str:
    """Write a configuration as a run's config.yaml has it; returns where."""
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config.to_dict(), sort_keys=False), encoding="utf-8")
    return str(path)


def message_of(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        make_config(raw)
    return str(caught.value)


# What is accepted


def test_the_presets_that_are_promised_ship() -> None:
    assert set(PRESETS) <= set(preset_names())


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_survives_its_own_config_yaml(preset: str, tmp_path: Path) -> None:
    config = load_config(preset)
    assert load_config(written(tmp_path, config)) == config
    assert preset_summary(preset)


def test_every_field_survives_config_yaml_when_it_differs_from_its_default(tmp_path: Path) -> None:
    config = make_config(
        {
            "task": {
                "id": "Pusher-v5",
                "num_envs": 6,
                "num_workers": 2,
                "kwargs": {"a": [1, 2.5, None], "b": {"c": ""}},
                "metrics": {"distance": "last", "collision": {"event": True}},
            },
            "policy": {"hidden_dims": [8], "critic_hidden_dims": [9, 10], "actor_groups": ["x"], "init_std": 0.3},
            "algo": {"learning_rate": 1e-5, "target_kl": 0.02, "schedule": "adaptive"},
            "training": {"seed": 2**31, "device": "cuda:1"},
            "logging": {"wandb": "offline", "wandb_project": "007"},
            "features": {"save_video": False},
        }
    )
    assert load_config(written(tmp_path, config)) == config


def test_an_empty_file_and_an_empty_section_mean_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "section.yaml").write_text("algo:\n")
    assert load_config(str(tmp_path / "empty.yaml")) == Config()
    assert load_config(str(tmp_path / "section.yaml"), [("algo.gamma", "0.9")]).algo == PPOConfig(gamma=0.9)


def test_overrides_replace_what_the_preset_says_and_leave_the_rest() -> None:
    overrides = [
        ("task.id", "Acrobot-v1"),
        ("policy.hidden_dims", "[32, 16]"),
        ("algo.target_kl", "null"),
        ("training.device", "cuda:1"),
        ("features.save_video", "false"),
        ("task.kwargs.render_mode", "rgb_array"),
        ("task.kwargs.limits.low", "-2"),
    ]
    config = load_config("cartpole_ppo", overrides)
    assert config.task.id == "Acrobot-v1"
    assert config.task.num_envs == 8
    assert isinstance(config.policy, PolicyConfig)
    assert config.policy.hidden_dims == (32, 16)
    assert isinstance(config.algo, PPOConfig)
    assert config.algo.target_kl is None
    assert config.training.device == "cuda:1"
    assert config.features.save_video is False
    assert isinstance(config.task, TaskConfig)
    assert config.task.kwargs == {"render_mode": "rgb_array", "limits": {"low": -2}}


def test_metrics_are_declared_in_yaml_and_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "task: {id: CartPole-v1, metrics: {distance: last, collision: {reduce: max, event: true}}}\n"
    )
    config = load_config(str(tmp_path / "a.yaml"), [("task.metrics.distance", "min"), ("task.metrics.x.group", "mine")])
    assert isinstance(config.task, TaskConfig)
    assert config.task.metric_specs == [
        MetricSpec("distance", "min"),
        MetricSpec("collision", "max", event=True),
        MetricSpec("x", group="mine"),
    ]
    config = load_config("cartpole_ppo", [("task.metrics", "{x: mean}")])
    assert config.task.make_env("cpu", 1).metric_specs == {"x": MetricSpec("x", "mean")}
    config = load_config("lift_ppo", [("task.metrics.x", "mean")])
    with refused(EnvError, "task.id lift", "metrics"):
        config.task.make_env("cpu", 1)


def test_overrides_do_not_change_what_they_are_given() -> None:
    raw = {"task": {"kwargs": {"a": 1}}}
    assert with_overrides(raw, [("task.kwargs.a", "2")])["task"]["kwargs"] == {"a": 2}
    assert raw == {"task": {"kwargs": {"a": 1}}}


def test_numbers_in_scientific_notation_are_numbers_also_where_yaml_reads_text(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("algo: {learning_rate: 1e-3}\ntraining: {total_timesteps: 1e6}\n")
    config = load_config(str(tmp_path / "a.yaml"), [("algo.adam_eps", "1e-7"), ("task.num_envs", "1e2")])
    algo = config.to_dict()["algo"]
    assert (algo["learning_rate"], algo["adam_eps"]) == (0.001, 1e-7)
    assert (config.training.total_timesteps, config.task.num_envs) == (1_000_000, 100)
    assert isinstance(config.training.total_timesteps, int)


@pytest.mark.parametrize(("text", "value"), [("5", "5"), ("my_envs:", "my_envs:"), ('"lift"', "lift")])
def test_a_field_of_text_takes_what_is_typed(text: str, value: str) -> None:
    assert load_config(None, [("task.id", text)]).task.id == value


def test_the_kind_of_policy_is_the_algorithms_own_where_none_is_given() -> None:
    assert load_config(None, [("task.id", "payload"), ("algo.name", "ppo_roa")]).policy.kind == "roa"
    with refused(ConfigError, "policy.kind", "mlp"):
        load_config(None, [("algo.name", "ppo_roa"), ("policy.kind", "mlp")])


# What is refused


@pytest.mark.parametrize("row", REFUSALS, ids=str)
def test_a_problem_is_named_with_its_field_and_value(row: Refusal) -> None:
    with refused(row.error, row.field, row.value) as caught:
        load_config(row.preset, row.overrides.items())
    others = [line for line in str(caught.value).splitlines() if row.field not in line]
    assert others == [], "other fields are blamed too"


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({1: {}}, ["Unknown section '1'"]),
        ({"algo": 3}, ["'algo'", "must hold fields", "3"]),
        ({"task": {5: 1}}, ["'task.5'", "num_envs"]),
        ({"task": {"kwargs": {"when": {1, 2}}}}, ["task.kwargs.when", "{1, 2}", "quote"]),
        ({"algo": {"learning_rate": float("nan")}}, ["algo.learning_rate", "nan"]),
    ],
    ids=str,
)
def test_what_only_a_file_can_hold_is_named_too(raw: dict[str, Any], named: list[str]) -> None:
    with refused(ConfigError, *named):
        make_config(raw)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"trainig": {}}, ["'trainig'", "Did you mean 'training'?", "features"]),
        ({"algo": {"learning_rat": 1}}, ["'algo.learning_rat'", "Did you mean 'learning_rate'?"]),
        ({"algo": {"name": "pppo"}}, ["algo.name", "'pppo'", "Did you mean 'ppo'?"]),
        ({"task": {"metrics": {"x": {"redcue": "sum"}}}}, ["task.metrics.x", "'redcue'", "Did you mean 'reduce'?"]),
        ({"policy": {**VLA, "freeze": ["txt"]}}, ["policy.freeze", "'txt'", "Did you mean 'text'?", "expert"]),
    ],
    ids=str,
)
def test_a_typo_in_a_file_gets_the_nearest_name(raw: dict[str, Any], named: list[str]) -> None:
    with refused(ConfigError, *named):
        make_config(raw)


@pytest.mark.parametrize(
    ("preset", "overrides", "has"),
    [
        ("pendulum_sac", {"algo.clip_coef": "0.2"}, "--algo.name sac"),
        ("stage11_ript_vla", {"task.num_envs": "3"}, "num_parallel_envs"),
        ("stage11_ript_vla", {"task.id": "lift", "task.benchmark_name": "mt10"}, "--task.benchmark_name"),
    ],
)
def test_a_field_of_another_kind_is_unknown(preset: str, overrides: dict[str, str], has: str) -> None:
    with refused(ConfigError, "Unknown field", f"'{next(iter(overrides))}'", has):
        load_config(preset, overrides.items())


def test_what_a_vla_may_be_reaches_to_its_bounds() -> None:
    bounds = {"lora_rank": 0, "init_std": 0.01, "denoising_steps": 1, "guidance": 0.0, "width": 1, "depth": None}
    config = make_config({**SUITE, "policy": {**VLA, **bounds, "freeze": list(FREEZABLE)}})
    assert isinstance(config.policy, VLAConfig)
    assert config.policy.freeze == FREEZABLE
    assert all(name in field_help(VLAConfig)["freeze"] for name in FREEZABLE)
    with refused(ConfigError, "policy.init_std", 0.0099):
        VLAConfig(init_std=0.0099)
    VLAConfig(init_std=2.0, lora_rank=16384)


def test_an_old_name_is_refused_with_the_new_one() -> None:
    with refused(ConfigError, "algo.lam was renamed to algo.gae_lambda."):
        make_config({"algo": {"lam": 0.9}})
    with refused(ConfigError, "algo.lam was renamed to algo.gae_lambda."):
        with_overrides({}, [("algo.lam", "0.9")])
    old: dict[str, Any] = {"clip": 0.1}
    with refused(ConfigError, "algo.clip was renamed to algo.clip_coef."):
        PPOConfig(**old)
    assert "renamed" not in message_of({"algo": {"name": "sac", "lam": 0.9}}), "SAC has no such field"


def test_all_problems_are_reported_at_once() -> None:
    message = message_of({"task": {"num_envs": "x"}, "algo": {"clip_coef": 5, "gama": 1}, "trainig": {}})
    for name in ("task.num_envs", "algo.gama", "algo.clip_coef", "trainig"):
        assert name in message
    assert len(message.splitlines()) == 4


@pytest.mark.parametrize(
    ("option", "nearest"),
    [("algo.learning_rte", "algo.learning_rate"), ("task.num_env", "task.num_envs"), ("tsk.id", "task.id")],
)
def test_a_typo_in_an_option_gets_the_nearest_name(option: str, nearest: str) -> None:
    with refused(ConfigError, f"'--{option}'", f"Did you mean '--{nearest}'"):
        with_overrides({}, [(option, "1")])


def test_an_option_below_a_plain_value_is_refused() -> None:
    with refused(ConfigError, "task.kwargs.a.b", "'a' is 3"):
        with_overrides({"task": {"kwargs": {"a": 3}}}, [("task.kwargs.a.b", "1")])


def test_an_unknown_preset_gets_the_nearest_name_and_the_list() -> None:
    with refused(ConfigError, "'cartpole_pp'", "Did you mean 'cartpole_ppo'?", "lift_ppo", "YAML file"):
        read_source("cartpole_pp")


@pytest.mark.parametrize("name", ["missing.yaml", "folder.yaml"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    with refused(ConfigError, tmp_path / name, "cartpole_ppo"):
        read_source(str(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("- a\n- b\n", ["sections (task, policy", "list"]),
        ("just words", ["sections (task, policy", "str"]),
        ("algo: {gamma: 1", ["not plain YAML", "line 1"]),
        ("algo:\n\tgamma: 1", ["not plain YAML", "line 2"]),
        ("task: {kwargs: {when: 2020-99-99}}", ["not plain YAML", "month"]),
        ("[" * 100_000, ["not plain YAML"]),
        ("? [1]\n: 2", ["not plain YAML", "unhashable"]),
        ("algo:\n  gamma: !!bool maybe", ["line 2, algo.gamma: the tag '!!bool' is refused. Use plain values only"]),
        ("algo: !!binary aGVsbG8=", ["line 1, section 'algo': the tag '!!binary' is refused"]),
        ("task:\n  kwargs: {x: !mine [1]}", ["line 2, task.kwargs.x: the tag '!mine' is refused"]),
        (f"training: {{seed: 0x{'f' * 5000}}}", ["the number in line 1 has too many digits"]),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(text: str, parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_source(str(path))
    assert [part for part in [*parts, "bad.yaml"] if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize("tag", ["python/object/apply:pathlib.Path.touch", "python/object/new:pathlib.Path.touch"])
def test_a_file_with_code_in_it_is_refused_and_does_not_run(tag: str, tmp_path: Path) -> None:
    target = tmp_path / "created"
    text = f"task:\n  kwargs:\n    x: !!{tag}\n    - !!python/object/apply:pathlib.Path ['{target}']\n"
    path = tmp_path / "code.yaml"
    path.write_text(text)
    with refused(ConfigError, path, "line 3", f"!!{tag}"):
        load_config(str(path))
    assert with_overrides({}, [("task.id", f"!!{tag} [a]")])["task"]["id"].startswith("!!python")
    assert not target.exists()


# Whatever is thrown at it

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    PLAIN | st.sampled_from(["gru", "ppo", "1e3", "auto"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=4,
)
TEXTS = st.text(max_size=12) | st.sampled_from(["0x_", "2020-13-01", "[", "1e999", "null"])


def refusal(make: Callable[[], Config]) -> str | None:
    """Return what was said against a configuration, None when it was taken; no other exception will do."""
    try:
        make()
    except ConfigError as error:
        return str(error)
    return None


@settings(max_examples=250, deadline=None)
@given(path=st.sampled_from(field_paths()), value=VALUES)
def test_any_value_for_any_field_is_taken_or_refused_by_name(path: str, value: Any) -> None:
    section, name = path.split(".")
    said = refusal(lambda: make_config({section: {name: value}}))
    assert said is None or path in said


@settings(max_examples=150, deadline=None)
@given(path=st.sampled_from(field_paths()), text=TEXTS)
def test_any_text_for_any_option_is_taken_or_refused_by_name(path: str, text: str) -> None:
    said = refusal(lambda: load_config("cartpole_ppo", [(path, text)]))
    assert said is None or path in said


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("taskid:algo \n-[]{}&*!?|>'\"0123.e_\t#%@"), max_size=40))
def test_any_file_is_taken_or_refused(text: str) -> None:
    said = refusal(lambda: make_config(parse_yaml(text, "some.yaml")))
    assert said is None or said


# Every field counts


TAKEN_BY_NAME: dict[type, tuple[type, ...]] = {
    VLAConfig: (VLAPolicy, LikelihoodHead, FlowHead),
    PolicyConfig: (ActionHead,),
}
"""Networks that are given fields as options of the same name."""


def _reads(sources: Iterable[Path]) -> set[tuple[str, str]]:
    """Return (owner, attribute) of every attribute read, outside the checks that configurations make of themselves."""
    found: set[tuple[str, str]] = set()

    def visit(node: ast.AST, inside: str = "") -> None:
        if isinstance(node, ast.FunctionDef) and node.name in ("__post_init__", "check"):
            return
        if isinstance(node, ast.ClassDef):
            inside = node.name
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).rpartition(".")[2]
            found.add((inside if owner == "self" else owner, node.attr))
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    for source in sources:
        visit(ast.parse(source.read_text()))
    return found


def _unread(section: str, cls: type, names: Iterable[str], reads: set[tuple[str, str]]) -> list[str]:
    taken = {name for taker in TAKEN_BY_NAME.get(cls, ()) for name in inspect.signature(taker).parameters}
    owners = (section, cls.__name__, "cfg", "roa_cfg")
    return [name for name in names if name not in taken and not any((owner, name) in reads for owner in owners)]


CLASSES = [(section, cls) for section, classes in CONFIG_SECTIONS.items() for cls in classes]


@pytest.mark.parametrize(("section", "cls"), CLASSES)
def test_every_field_is_read_by_something(section: str, cls: type) -> None:
    reads = _reads(SOURCES)
    assert _unread(section, cls, [entry.name for entry in fields(cls)], reads) == []
    assert _unread(section, cls, ["made_up"], reads) == ["made_up"]


@pytest.mark.parametrize(("section", "cls"), CLASSES)
def test_every_field_has_a_sentence(section: str, cls: type) -> None:
    texts = field_help(cls)
    assert list(texts) == [entry.name for entry in fields(cls)]
    assert all(text.endswith(".") and len(text) > 8 for text in texts.values()), texts


def test_the_help_shows_every_field_with_its_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help-all"]) == 0
    shown = capsys.readouterr().out
    for section, cls in CLASSES:
        for name, text in field_help(cls).items():
            assert f"--{section}.{name} " in shown
            assert text.replace("``", "'") in shown
    assert "--resume" in shown


def test_configurations_cannot_be_changed_in_place() -> None:
    algo: Any = Config().algo
    with pytest.raises(AttributeError):
        algo.learning_rate = 0.5


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [("task: {}\nalgo: {}\ntask: {}", "task", 3), ("algo:\n  gamma: 0.9\n  gamma: 0.8", "gamma", 3)],
)
def test_a_key_that_is_given_twice_is_named(text: str, key: str, line: int) -> None:
    with refused(ConfigError, "my.yaml", f"'{key}'", f"line {line}"):
        parse_yaml(text, "my.yaml")
    with refused(ConfigError, "--task.kwargs", "'a'"):
        with_overrides({}, [("task.kwargs", "{a: 1, a: 2}")])


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-3",
        "1_000",
        "0x1F",
        "017",
        "0b11",
        "1.5",
        "-2.",
        ".5",
        "1.0e+3",
        "-.inf",
        ".inf",
        "ten",
        "null",
        "true",
        "08",
    ],
)
def test_other_scalars_are_read_as_yaml_reads_them(text: str) -> None:
    assert parse_yaml(f"a: {text}", "x") == yaml.safe_load(f"a: {text}")
