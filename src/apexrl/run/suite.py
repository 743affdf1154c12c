"""What a run on a task suite has beside any other: its environments, its collector, and the files of its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from apexrl.agent import checkpoint
from apexrl.agent.loggers import Logger
from apexrl.agent.trainer import TrainingConfig
from apexrl.algorithms import BC, RLOO, BaseAlgorithm, BCConfig, RLOOConfig
from apexrl.collectors import BaseCollector, DemoCollector, RolloutGenerator, RolloutStats, SuiteRunner
from apexrl.collectors.demonstrations.record import Recorded, record_demos
from apexrl.collectors.demonstrations.samples import SUFFIX, load_demos
from apexrl.collectors.init_states import read_statistics
from apexrl.core.errors import ConfigError, EnvError, plural
from apexrl.core.system import distributed
from apexrl.core.system.files import write_json
from apexrl.core.system.json_lines import read_json_lines
from apexrl.envs.mujoco.simulation import num_cores
from apexrl.envs.suites import make_suite
from apexrl.envs.suites.base import TaskSuite
from apexrl.envs.suites.env import SuiteVecEnv
from apexrl.policies import Policy
from apexrl.run.config import Config
from apexrl.run.records import is_count
from apexrl.run.sections import SuiteConfig

METRICS_FILE, FINAL_RESULTS, ROLLOUT_STATS = "metrics.json", "final_training_results.json", "rollout_stats.json"
FIRST_ROLLOUT_STATS = ".rollout_stats_at_start.json"
"""What was known of the init states when the run began."""
DEMOS, IMITATION = "demos", "imitation"
"""Directories of a run: demonstrations that it recorded itself, and the imitation of them before its first rollout."""


def make_suite_env(task: SuiteConfig, device: torch.device | str, num_envs: int | None = None) -> SuiteVecEnv:
    """Make the environments of a suite; no simulator is made before the first reset.

    Args:
        task: the suite and its options.
        device: where tensors are wanted.
        num_envs: of an evaluation, whose episodes come from the validation states; None makes those of training.
    """
    suite = _make_suite(task)
    count = num_envs or task.num_parallel_envs
    return SuiteVecEnv(
        suite,
        count,
        chunk=task.chunk,
        num_workers=None if task.num_workers is None else min(task.num_workers, count),
        max_cached_envs=task.max_cached_envs,
        split="val" if num_envs else "train",
        max_steps=task.max_episode_length,
        device=device,
        step_timeout=task.step_timeout,
    )


def _make_suite(task: SuiteConfig, **more: Any) -> TaskSuite:
    if not task.benchmark_name.startswith("libero"):
        more["privileged"] = task.privileged
    cameras = {"cameras": task.cameras, "image_size": task.image_size}
    return make_suite(task.benchmark_name, task.task_names_to_use, **cameras, **more)


def demo_path(task: SuiteConfig, run_dir: Path) -> Path | None:
    """Return where the demonstrations of a run are: given, recorded by the run itself, or nowhere."""
    if task.demos:
        return Path(task.demos)
    return run_dir / DEMOS if task.num_demos else None


def record_own_demos(task: SuiteConfig, run_dir: Path, tell: Callable[[str], None]) -> None:
    """Record the demonstrations that a run is to have, except those of tasks that it recorded before it was stopped.

    Raises:
        ConfigError: when a task has fewer training states than that.
        EnvError: when the suite has no scripted experts, or one of them never reaches its goal.
    """
    directory = run_dir / DEMOS
    horizon = {} if task.max_episode_length is None else {"horizon": task.max_episode_length}
    names = _make_suite(task).task_names
    missing = [name for name in names if not (directory / f"{name}{SUFFIX}").is_file()]
    if not missing:
        return
    suite = _make_suite(replace(task, task_names_to_use=tuple(missing)), **horizon)
    available = len(suite.init_states(0, "train"))
    if task.num_demos > available:
        raise ConfigError(
            f"task.num_demos must be at most {available}, the training states of a task of '{task.benchmark_name}', "
            f"got {task.num_demos}."
        )
    what = f"{plural(task.num_demos, 'demonstration')} of {', '.join(missing)}"
    tell(f"Recording {what} with scripted experts, in {directory}")

    def note(name: str, recorded: Recorded) -> None:
        failed = f", {recorded.num_failures} attempts failed" if recorded.num_failures else ""
        tell(f"  {name}: {plural(recorded.num_demos, 'demonstration')}, {recorded.num_steps} steps{failed}")

    num_workers = num_cores() if task.num_workers is None else task.num_workers
    num_workers = 0 if len(missing) == 1 else min(num_workers, len(missing))
    try:
        record_demos(suite, directory, task.num_demos, num_workers=num_workers, on_progress=note)
    except EnvError as error:
        raise EnvError(
            f"task.num_demos: {error} These are options of 'apexrl demos', whose directory task.demos takes; here the "
            "horizon is task.max_episode_length."
        ) from error


def needs_own_demos(config: Config) -> bool:
    """Whether a run reads demonstrations that it records itself."""
    task, algo = config.task, config.algo
    if not isinstance(task, SuiteConfig) or task.demos or not task.num_demos:
        return False
    anchored = isinstance(algo, RLOOConfig) and algo.imitation_coef > 0
    return isinstance(algo, BCConfig) or anchored or imitates_first(config)


def imitates_first(config: Config) -> bool:
    """Whether a run begins with imitation."""
    return isinstance(config.algo, RLOOConfig) and config.algo.imitation_updates > 0 and not config.training.init_from


def imitation_config(config: Config, run_dir: Path) -> Config:
    """Return the configuration of the imitation that a run of RLOO begins with."""
    task, algo, training = config.task, config.algo, config.training
    assert isinstance(task, SuiteConfig)
    assert isinstance(algo, RLOOConfig)
    num_updates = algo.imitation_updates
    return replace(
        config,
        task=replace(task, demos=str(demo_path(task, run_dir)), num_demos=0),
        algo=BCConfig(
            num_updates=num_updates,
            batch_size=algo.imitation_batch_size,
            micro_batch_size=algo.micro_batch_size,
            learning_rate=algo.imitation_learning_rate,
            schedule="linear",
        ),
        training=replace(
            training, num_train_steps=0, eval_interval=0, save_interval=math.ceil(num_updates / 10), collector="sync"
        ),
        logging=replace(config.logging, log_interval=math.ceil(num_updates / 100), log_freq=0, wandb="disabled"),
    )


def make_suite_collector(
    task: SuiteConfig,
    algorithm: BaseAlgorithm,
    cfg: Any,
    env: SuiteVecEnv,
    *,
    seed: int,
    run_dir: Path,
    starts_new: bool,
) -> BaseCollector:
    """Make what RLOO or BC learns from: groups of rollouts, or demonstrations."""
    if isinstance(cfg, BCConfig):
        assert isinstance(algorithm, BC)
        samples = _read_demos(task, run_dir, env, "algo.name bc")
        return _demo_collector(samples, algorithm, cfg, starts_new=starts_new)
    if not isinstance(cfg, RLOOConfig):
        raise ConfigError(f"task.benchmark_name needs algo.name rloo or bc, got '{cfg.name}'.")
    if cfg.imitation_coef:
        assert isinstance(algorithm, RLOO)
        algorithm.remember(_read_demos(task, run_dir, env, "algo.imitation_coef"))
    first_path = Path(cfg.rollout_stats_path) if cfg.rollout_stats_path else run_dir / ROLLOUT_STATS
    path = first_path if distributed.is_main_process() else process_dir(run_dir, distributed.rank()) / ROLLOUT_STATS
    generator = RolloutGenerator.from_config(
        SuiteRunner(env, algorithm.policy, random_init=task.random_init),
        cfg,
        rollout_stats_path=path,
        reuse_envs=task.reuse_envs,
        seed=seed,
    )
    if generator.stats is not None:
        stats = generator.stats
        # The first process makes the directory, and clears it when it fails: the others write there only afterwards.
        distributed.on_main_process(lambda: begin_statistics(stats, run_dir, first_path))
        if not distributed.is_main_process():
            begin_statistics(stats, run_dir, first_path)
    return generator


def process_dir(run_dir: Path, number: int) -> Path:
    """Return where a process that learns with others keeps what it knows of the init states."""
    return run_dir if number == 0 else run_dir / f"process_{number}"


def begin_statistics(stats: RolloutStats, run_dir: Path, first_path: Path) -> None:
    """Let this process begin with what the run knows of the init states; a checkpoint may put other numbers there.

    A run that was killed before its first checkpoint begins with what was known when it was started. Outcomes belong
    to the policy, which all processes share: one without statistics of its own begins with those of the first
    (``first_path``), and those of processes that are no more are taken over by one that is.
    """
    own_dir = process_dir(run_dir, distributed.rank())
    if not distributed.is_main_process() and not len(stats) and first_path.exists():
        stats.load_state_dict(read_statistics(first_path))
    if checkpoint.numbered(run_dir / "checkpoints"):
        for path in _of_processes_that_are_no_more(run_dir):
            stats.load_state_dict({**read_statistics(path), **stats.state_dict()})
        return
    first = own_dir / FIRST_ROLLOUT_STATS
    if first.exists():
        stats.load_state_dict(read_statistics(first))
    else:
        write_json(first, stats.state_dict())
        stats.write()  # a place that cannot be written is better found before the first batch than after it


def _of_processes_that_are_no_more(run_dir: Path) -> list[Path]:
    """Return this process's share of the statistics that more processes left than there are now."""
    count, found = distributed.world_size(), []
    for path in sorted(run_dir.glob(f"process_*/{ROLLOUT_STATS}")):
        number = path.parent.name.removeprefix("process_")
        if number.isdecimal() and int(number) >= count and int(number) % count == distributed.rank():
            found.append(path)
    return found


def suite_training(training: TrainingConfig, log_freq: int, algo: Any, num_tasks: int) -> TrainingConfig:
    """Return the schedule with what follows from other sections.

    How often to evaluate, how many steps of BC, and as many episodes for every task.
    """
    updates = algo.num_updates if isinstance(algo, BCConfig) else 0
    return replace(
        training,
        eval_interval=log_freq or training.eval_interval,
        eval_episodes=num_tasks * math.ceil(training.eval_episodes / num_tasks),
        final_eval_episodes=num_tasks * math.ceil(training.final_eval_episodes / num_tasks),
        num_train_steps=training.num_train_steps or updates,
    )


@torch.no_grad()
def explore_with(policy: Policy, init_std: float) -> None:
    """Set a standard deviation that imitation has left as it was; one that was learned stays."""
    for name, value in policy.named_parameters():
        if name.endswith("log_std") and value.numel() > 1 and bool((value == value.flatten()[0]).all()):
            value.fill_(math.log(init_std))


def _demo_collector(samples: TensorDict, algorithm: BC, cfg: BCConfig, *, starts_new: bool) -> DemoCollector:
    if starts_new:  # else the networks already expect what they were trained with
        algorithm.set_statistics(samples)
    return DemoCollector(samples.to(algorithm.policy.device), cfg.batch_size)


def _read_demos(task: SuiteConfig, run_dir: Path, env: SuiteVecEnv, reader: str) -> TensorDict:
    path = demo_path(task, run_dir)
    if path is None:
        raise ConfigError(
            f"{reader} needs task.demos, a directory of demonstrations; 'apexrl demos "
            f"{task.benchmark_name} --per-task 10 --output DIR' records some, and so does the run with task.num_demos "
            "10."
        )
    try:
        return load_demos(path, env.suite, task.chunk)
    except ConfigError as error:
        raise ConfigError(f"task.demos: {error}") from error


class SuiteResults(Logger):
    """Keeps ``metrics.json``, an array with one entry for each evaluation over all tasks."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def log(self, values: Mapping[str, float]) -> None:
        """Write it anew, from the evaluations that the run has recorded."""
        if "eval/return" in values:
            write_json(self.run_dir / METRICS_FILE, suite_evaluations(self.run_dir))


def suite_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run in the form of ``metrics.json``; a line without its place is left out.

    One entry per training step: the evaluation at the end takes the place of the periodic one of the same step.
    """
    entries = {
        record["iteration"]: {
            "step": record["iteration"],
            "environment_steps": record["step"],
            "overall_success_rate": record.get("success_rate"),
            "overall_success_interval": record.get("success_rate_interval"),
            "reward": record.get("return"),
            "per_task": record.get("per_task", {}),
        }
        for record in read_json_lines(run_dir / "evaluations.jsonl")
        if is_count(record.get("iteration")) and is_count(record.get("step"))
    }
    return list(entries.values())


def write_final_results(run_dir: Path, iteration: int, environment_steps: int, optimizer_steps: int | None) -> Path:
    """Write ``final_training_results.json``: how long training was, its numbers, and the evaluations.

    ``total_steps`` counts training steps (iterations) throughout the file, ``environment_steps`` control steps.
    """
    found = suite_evaluations(run_dir)
    write_json(run_dir / METRICS_FILE, found)
    content = {
        "total_steps": iteration,
        "environment_steps": environment_steps,
        "optimizer_steps": optimizer_steps,
        "training_metrics": [_as_training_step(line) for line in read_json_lines(run_dir / "metrics.jsonl")],
        "evaluations": found,
    }
    return write_json(run_dir / FINAL_RESULTS, content)


def _as_training_step(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of ``metrics.jsonl``, where ``total_steps`` counts environment steps, with the results' names."""
    return {**line, "total_steps": line.get("iteration"), "environment_steps": line.get("total_steps")}
