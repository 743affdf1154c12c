"""What a run on a task suite has beside any other: its environments, its collector, and the files of its results."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from apexrl import distributed, files
from apexrl.agent import checkpoint
from apexrl.agent.trainer import TrainingConfig
from apexrl.algorithms import BC, RLOO, BaseAlgorithm, BCConfig, RLOOConfig
from apexrl.collectors import (
    BaseCollector,
    DemoCollector,
    InitStateDataset,
    RolloutGenerator,
    RolloutStats,
    SuiteRunner,
)
from apexrl.collectors.init_states import read_statistics
from apexrl.demo_samples import load_demos
from apexrl.envs.suite_env import SuiteVecEnv
from apexrl.envs.suites import make_suite
from apexrl.errors import ConfigError
from apexrl.loggers import Logger, read_json_lines
from apexrl.policies import Policy
from apexrl.records import Damage, columns, is_count
from apexrl.sections import SuiteConfig

METRICS, FINAL_RESULTS, ROLLOUT_STATS = "metrics.json", "final_training_results.json", "rollout_stats.json"
FIRST_ROLLOUT_STATS = ".rollout_stats_at_start.json"
"""What was known of the init states when the run began."""


def make_suite_env(task: SuiteConfig, device: torch.device | str, num_envs: int | None = None) -> SuiteVecEnv:
    """Make the environments of a suite; no simulator is made before the first reset.

    Args:
        task: the suite and its options.
        device: where tensors are wanted.
        num_envs: of an evaluation, whose episodes come from the validation states; None makes those of training.
    """
    options: dict[str, Any] = {"privileged": task.privileged} if not task.benchmark_name.startswith("libero") else {}
    suite = make_suite(
        task.benchmark_name, task.task_names_to_use, cameras=task.cameras, image_size=task.image_size, **options
    )
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
        return _demo_collector(task, algorithm, cfg, env, starts_new=starts_new)
    if not isinstance(cfg, RLOOConfig):
        raise ConfigError(f"task.benchmark_name needs algo.name rloo or bc, got '{cfg.name}'.")
    if cfg.imitation_coef:
        assert isinstance(algorithm, RLOO)
        algorithm.remember(_read_demos(task, env, "algo.imitation_coef"))
    first_path = Path(cfg.rollout_stats_path) if cfg.rollout_stats_path else run_dir / ROLLOUT_STATS
    path = first_path if distributed.is_first() else process_dir(run_dir, distributed.rank()) / ROLLOUT_STATS
    generator = RolloutGenerator(
        SuiteRunner(env, algorithm.policy),
        rollouts_per_env=cfg.rloo_batch_size,
        num_envs=cfg.num_groups,
        init_state_dataset=InitStateDataset(env.suite),
        enable_dynamic_sampling=cfg.enable_dynamic_sampling,
        rollout_skip_threshold=cfg.rollout_skip_threshold,
        enable_rollout_stats_tracking=cfg.enable_rollout_stats_tracking,
        rollout_stats_path=path,
        seed=seed,
        oversample=cfg.oversample,
        max_attempts=cfg.max_attempts,
        max_groups=math.ceil(cfg.oversample * cfg.num_groups),
    )
    if generator.stats is not None:
        stats = generator.stats
        if cfg.rollout_stats_path and distributed.is_first():
            stats.run = run_name(run_dir)
        # The first process makes the directory, and clears it when it fails: the others write there only afterwards.
        distributed.on_first(lambda: begin_statistics(stats, run_dir, first_path))
        if not distributed.is_first():
            begin_statistics(stats, run_dir, first_path)
    return generator


def run_name(run_dir: Path) -> str:
    """Return a short name that tells a run from others that write into the same statistics."""
    return hashlib.sha256(str(run_dir.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:8]


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
    if not distributed.is_first() and not len(stats) and first_path.exists():
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


def _demo_collector(
    task: SuiteConfig, algorithm: BC, cfg: BCConfig, env: SuiteVecEnv, *, starts_new: bool
) -> DemoCollector:
    samples = _read_demos(task, env, "algo.name bc")
    if starts_new:  # else the networks already expect what they were trained with
        algorithm.set_statistics(samples)
    return DemoCollector(samples.to(algorithm.policy.device), cfg.batch_size)


def _read_demos(task: SuiteConfig, env: SuiteVecEnv, reader: str) -> TensorDict:
    if not task.demos:
        raise ConfigError(
            f"{reader} needs task.demos, a directory of demonstrations; 'apexrl demos "
            f"{task.benchmark_name} --per-task 10 --output DIR' records some."
        )
    try:
        return load_demos(task.demos, env.suite, task.chunk)
    except ConfigError as error:
        raise ConfigError(f"task.demos: {error}") from error


class SuiteResults(Logger):
    """Keeps ``metrics.json``, an array with one entry for each evaluation over all tasks."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def log(self, values: Mapping[str, float]) -> None:
        """Write it anew, from the evaluations that the run has recorded."""
        if "eval/return" in values:
            write_json(self.run_dir / METRICS, evaluations(self.run_dir))


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run in the form of ``metrics.json``; a line without its place is left out."""
    return [
        {
            "step": record["iteration"],
            "environment_steps": record["step"],
            "overall_success_rate": record.get("success_rate"),
            "overall_success_interval": record.get("success_rate_interval"),
            "reward": record.get("return"),
            "per_task": record.get("per_task", {}),
        }
        for record in read_json_lines(run_dir / "evaluations.jsonl")
        if is_count(record.get("iteration")) and is_count(record.get("step"))
    ]


def write_final_results(run_dir: Path, iteration: int, total_steps: int) -> Path:
    """Write ``final_training_results.json``: how long training was, its numbers, and the evaluations."""
    training = read_json_lines(run_dir / "metrics.jsonl")
    updates = columns(training, Damage(run_dir / "metrics.jsonl"), ["train/updates"]).get("train/updates", 0.0)
    found = evaluations(run_dir)
    write_json(run_dir / METRICS, found)
    content = {
        "total_steps": iteration,
        "environment_steps": total_steps,
        "optimizer_steps": int(np.nansum(updates)),
        "training_metrics": training,
        "evaluations": found,
    }
    return write_json(run_dir / FINAL_RESULTS, content)


def write_json(path: Path, content: Any) -> Path:
    """Replace a JSON file atomically."""
    return files.replace_text(path, json.dumps(content, indent=1))
