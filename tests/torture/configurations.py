"""Generated configurations, valid and not: no traceback, every message names the field, nothing is left behind."""

from __future__ import annotations

import contextlib
import io
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.torture.harness import Line, Outcome, Report, command, use_points

from apexrl.cli.main import main
from apexrl.core.errors import ConfigError
from apexrl.run.config import CONFIG_SECTIONS, Config, section_class
from apexrl.run.loading import load_config
from apexrl.run.sources import preset_names, read_source

JUNK = (
    "", " ", "abc", "null", "~", "[]", "{}", "[1,", "{a: 1}", "nan", ".nan", ".inf", "-.inf", "1e400", "-1", "0", "0.0",
    "-0.5", "1.5", "3", "1e-12", "1e12", "99999999999999999999", "true", "false", "yes", "[-1]", "[0]", "[1e9]",
    "[a, b]", "[[1]]", "[1, 2, 3]", "2024-01-01", "10:30", "0x10", "1_000", "💥", "x" * 3000, "!!python/name:os.system",
    "!!binary aGVsbG8=", "!!set {a, b}", "&a [*a]", "*a", "'", '"', "a: b: c", "\t", "- 1\n- 2", "%", "@x", "None",
    "cuda", "cuda:99", "/dev/null", "../..", "lift", "CartPole-v1", "mlp", "ppo", "sac", "rloo",
)  # fmt: skip
FORCED = {
    "training.total_timesteps": "1",
    "training.num_train_steps": "1",
    "training.final_eval_episodes": "0",
    "training.collector": "sync",
    "features.save_video": "false",
    "features.save_plot": "false",
    "features.compile": "false",
    "logging.wandb": "disabled",
}
"""What a configuration that is really started gets on top, so that it ends soon."""
STARTED = ("lift_ppo", "pendulum_ppo", "pendulum_sac", "payload_roa", "cartpole_ppo", "stage11_ript_vla")
"""The presets whose configurations are started."""


@dataclass
class Example:
    """A configuration as a user writes it: a preset or file, and overrides."""

    preset: str
    values: dict[str, str]
    as_file: bool
    broken: str
    """Replaces a section of the file; or an empty text."""

    def arguments(self, file: Path) -> tuple[str, list[tuple[str, str]]]:
        """Return the source, which may be written to ``file``, and the overrides."""
        if not self.as_file:
            return self.preset, list(self.values.items())
        content: dict[str, Any] = read_source(self.preset)
        for name, text in self.values.items():
            section, _, key = name.partition(".")
            place = content.setdefault(section, {})
            if isinstance(place, dict):
                place[key] = _parsed(text)
        if self.broken:
            section = next(iter(self.values)).partition(".")[0]
            content[section] = _parsed(self.broken)
        file.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
        return str(file), []


def _parsed(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
        yaml.safe_dump(value)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return value


def _field_names(preset: str) -> list[str]:
    content = read_source(preset)
    names = []
    for section in CONFIG_SECTIONS:
        cls = section_class(section, content.get(section) or {})
        names += [f"{section}.{entry.name}" for entry in fields(cls)]
    return [*names, "task.kwargs.max_episode_steps", "task.kwargs.no_such_option"]


def _plausible(preset: str, name: str) -> st.SearchStrategy[str]:
    """Return values of the kind that a field has."""
    section, _, key = name.partition(".")
    if key.startswith("kwargs."):
        return st.integers(-1, 20).map(str)
    hint = get_type_hints(section_class(section, read_source(preset).get(section) or {}))[key]
    choices = [hint, *get_args(hint)]
    if any(isinstance(choice, str) for choice in choices):
        return st.sampled_from([str(choice) for choice in choices if isinstance(choice, str)])
    if bool in choices:
        return st.sampled_from(["true", "false"])
    if int in choices:
        return st.integers(-1, 12).map(str)
    if any(get_args(choice)[:1] == (int,) for choice in choices):
        return st.lists(st.integers(0, 40), max_size=3).map(str)
    if float in choices:
        return st.one_of(st.floats(0, 1), st.floats(1e-6, 1e-2), st.integers(0, 3)).map(repr)
    return st.sampled_from(["", "[]", "{}", "abc", "auto", "[state]", "lift", "pendulum", "payload"])


@st.composite
def _examples(draw: st.DrawFn) -> Example:
    preset = draw(st.sampled_from(preset_names()))
    values = {}
    for name in draw(st.lists(st.sampled_from(_field_names(preset)), min_size=1, max_size=3, unique=True)):
        is_plausible = draw(st.integers(0, 9)) < 8
        text = draw(_plausible(preset, name) if is_plausible else st.sampled_from(JUNK) | st.text(max_size=12))
        if draw(st.integers(0, 19)) == 0:
            place = draw(st.integers(0, len(name) - 1))
            name = name[:place] + draw(st.sampled_from(["", "x", ".", "_", "-", "é"])) + name[place + 1 :]
        if "." in name.strip("."):
            values[name] = text
    values = values or {"algo.gamma": "0.9"}
    as_file = draw(st.booleans())
    broken = draw(st.sampled_from(JUNK)) if as_file and draw(st.integers(0, 9)) == 0 else ""
    return Example(preset, values, as_file, broken)


def configurations(report: Report, work: Path, count: int, num_started: int, seed_number: int) -> None:
    """Give generated configurations to ``apexrl train``; start some of the valid ones."""
    refused = report.line("generated configurations: not valid, refused")
    accepted = report.line("generated configurations: valid")
    started = report.line("generated configurations: valid, and really started")
    work.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()

    @seed(seed_number)
    @settings(
        max_examples=4 * count,  # some are the same again
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(_examples())
    def try_one(example: Example) -> None:
        file, run_dir = work / "generated.yaml", work / "generated"
        if len(seen) == count or str(example) in seen:
            return
        seen.add(str(example))
        source, overrides = example.arguments(file)
        words = ["train", source, "--run-dir", str(run_dir), *(f"--{name}={text}" for name, text in overrides)]
        try:
            config = load_config(source, overrides)
        except ConfigError:
            refused.add(_problem_of_refusal(example, _in_process(words), run_dir))
            return
        except Exception as error:
            refused.add(f"{example}: {type(error).__name__}: {error}")
            return
        accepted.add()
        if started.tried < num_started and example.preset in STARTED and _is_small(config):
            _start(started, example, config, words, run_dir)

    try_one()


def _in_process(words: list[str]) -> Outcome:
    """Run a command that will be refused; an exception counts as a traceback."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            return Outcome(main(words), said.getvalue())
    except BaseException as error:
        return Outcome(1, f"Traceback: {type(error).__name__}: {error}")


def _problem_of_refusal(example: Example, outcome: Outcome, run_dir: Path) -> str:
    if run_dir.exists():
        shutil.rmtree(run_dir)
        return f"{example}: something was written"
    if problem := outcome.refusal(names=f"{example}: "):
        return problem
    # A section that is unknown, or holds no fields, stands for its fields; of a broken one others may be missed.
    fields = [".".join(name.split(".")[:2]) for name in example.values]
    sections = [name.partition(".")[0] for name in fields]
    names = [*example.values, *fields, *(f"ection '{section}'" for section in sections)]
    names += [f"{section}." for section in sections if example.broken]
    named = any(name in outcome.said for name in names)
    return "" if named else f"{example}: the message names no field of it: {outcome.said[:600]}"


def _is_small(config: Config) -> bool:
    """Whether a configuration is started and over within seconds."""
    sizes = [getattr(config.task, "num_envs", 1) // 64, *(width // 128 for width in _widths(config))]
    limits = {"num_steps": 64, "num_epochs": 12, "num_minibatches": 64, "adapt_epochs": 12, "batch_size": 512,
              "utd_ratio": 4, "num_critics": 12, "rloo_batch_size": 12, "num_groups": 24, "max_attempts": 6,
              "buffer_size": 2_000_000, "oversample": 4}  # fmt: skip
    over = [name for name, limit in limits.items() if (getattr(config.algo, name, 0) or 0) > limit]
    workers = getattr(config.task, "num_workers", 0) or 0
    episode = getattr(config.task, "max_episode_length", 0) or 0
    return max(sizes) <= 4 and not over and workers <= 2 and episode <= 200


def _widths(config: Config) -> list[int]:
    policy: Any = config.policy
    groups = [getattr(policy, name, ()) or () for name in ("hidden_dims", "critic_hidden_dims", "encoder_dims")]
    return [0, *(width for group in groups for width in group), getattr(policy, "rnn_hidden_dim", 0)]


def _start(line: Line, example: Example, config: Config, words: list[str], run_dir: Path) -> None:
    options = [f"--{name}={text}" for name, text in FORCED.items()]
    if not hasattr(config.task, "kwargs"):
        options.append("--task.num_workers=0")
    if hasattr(config.algo, "imitation_updates"):
        options += ["--algo.imitation_updates=2", "--algo.num_epochs=1"]
    output = run_dir.with_name("generated.txt")
    outcome = command([*words, *options], output, [(use_points, ())] if not hasattr(config.task, "kwargs") else [])
    if outcome.code == 0 and "Traceback" not in outcome.said:
        line.add("" if (run_dir / "checkpoints").exists() else f"{example}: nothing was saved")
    else:  # refused by the task or the policy
        problem = outcome.refusal(names=f"{example}: ")
        if not problem and not any(f"{section}." in outcome.said for section in CONFIG_SECTIONS):
            problem = f"{example}: the message names no field: {outcome.said[:600]}"
        line.add(problem or (f"{example}: something was written" if run_dir.exists() else ""))
        line.note = f"{int((line.note or '0').split()[0]) + 1} were refused by task or policy, with a message"
    shutil.rmtree(run_dir, ignore_errors=True)
