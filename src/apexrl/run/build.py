"""From a configuration to environments, policy, algorithm and trainer."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apexrl.agent import Trainer, checkpoint
from apexrl.agent.loggers import Logger
from apexrl.agent.recipe import Recipe
from apexrl.agent.schedule import TrainingConfig
from apexrl.agent.training_log import tell
from apexrl.algorithms import AlgorithmConfig, BaseAlgorithm, PPOConfig
from apexrl.algorithms.base import find_device
from apexrl.core.errors import CheckpointError, ConfigError
from apexrl.core.plugins import accepted, creating
from apexrl.core.system import distributed
from apexrl.core.system.acceleration import Acceleration
from apexrl.core.system.files import DirectoryLock
from apexrl.core.types import VALUE
from apexrl.envs import VecEnv
from apexrl.policies import Policy
from apexrl.policies.config import PolicyConfig, VLAConfig
from apexrl.policies.vla.lora import with_adapters
from apexrl.run.config import Config, algorithm_class


def make_trainer(
    config: Config,
    run_dir: Path,
    loggers: Sequence[Logger] = (),
    *,
    init_from: str = "",
    lock: DirectoryLock | None = None,
    recipe: Recipe | None = None,
) -> Trainer:
    """Create environment, policy, algorithm and trainer for a configuration.

    ``init_from`` is a run directory or checkpoint with the first weights of the policy; when empty they are random.
    The trainer gives the ``lock`` of the run directory back. The ``recipe`` of a run that was started in Python says
    how its policy is created, in the place of the section ``policy``.
    """
    device = prepare_device(config)
    whole = decided(config, device)
    config = _own_share(whole)
    task, training, features = config.task, config.training, config.features
    torch.manual_seed(training.seed)
    random.seed(training.seed)
    np.random.seed(training.seed)
    # Ray's workers make their own; here one is enough, for the spaces and to make others for evaluation.
    env = task.make_env(device, 1 if training.collector == "ray" else None)
    policy = recipe.make_policy(env).to(device) if recipe else make_policy(config.policy, env, device, config.algo)
    if init_from:
        # Before the algorithm is created, which may copy weights from one network to another.
        _load_weights(policy, Path(init_from), env)
    precision: Any = features.precision
    acceleration = Acceleration(graphs=features.cuda_graphs, compile=bool(features.compile), precision=precision)
    acceleration.apply()
    several, in_background = distributed.world_size() > 1, training.collector == "async"
    if in_background or several:
        # A graph must not be captured while another thread uses the device, nor with an exchange between processes.
        acceleration = replace(acceleration, graphs=False)
    if several:
        acceleration = replace(acceleration, compile=False)
    make: Any = config.algorithm
    given = accepted(make, {"acceleration": acceleration})
    with creating(f"algo.name {config.algo.name} cannot be created", make):
        algorithm: BaseAlgorithm = make(policy=policy, cfg=config.algo, **given)
    if init_from:
        algorithm.begin_trained(config.policy.init_std)
    loggers = [*loggers, *task.loggers(run_dir)]
    collecting = replace(acceleration, compile=acceleration.compile and features.compile is True)
    collector = task.make_collector(config, env, algorithm, collecting, run_dir)
    collector.on_message = partial(tell, loggers)
    trainer = Trainer(
        env,
        policy,
        algorithm,
        schedule(config, len(env.task_names)),
        collector=collector,
        loggers=loggers,
        run_dir=run_dir,
        save_dir=checkpoint.directory_of(run_dir),
        log_interval=config.logging.log_interval,
        log_reward_components=config.logging.reward_components,
        save_step_csv=features.save_step_csv,
        tensorboard=config.logging.tensorboard,
        config=None if recipe else whole.to_dict(),
        lock=lock,
    )
    graphs = features.cuda_graphs and device.type == "cuda"
    if several and (graphs or features.compile):
        trainer.tell(f"{distributed.world_size()} processes learn: CUDA graphs and compilation are switched off.")
    elif in_background and graphs:
        trainer.tell("training.collector async switches CUDA graphs off: another thread uses the device.")
    return trainer


COMPILE_FROM = {"cpu": 5_000, "cuda": 20_000}
"""Gradient steps of a run from which compiling them wins the time back; on a GPU those of a legged robot's training."""
COMPILE_ROLLOUT_FROM = 30_000
"""Steps of all environments together from which the policy is compiled too on a CPU: that takes four seconds, once, and
from here on every run after the first wins two."""


def decided(config: Config, device: torch.device) -> Config:
    """Return the configuration with ``auto`` decided, by the numbers of the run alone: equal runs decide alike.

    What is in the cache of compiled code does not count, because compiled code rounds differently.
    """
    features, training, num_envs = config.features, config.training, config.task.num_envs
    compiles, precision = features.compile, features.precision
    if compiles == "auto":
        total = training.num_train_steps * getattr(config.algo, "num_steps", 0) * num_envs or training.total_timesteps
        enough = config.algo.num_gradient_steps(total, num_envs) >= COMPILE_FROM.get(device.type, math.inf)
        whole = device.type != "cpu" or total // num_envs >= COMPILE_ROLLOUT_FROM
        compiles = enough and distributed.world_size() == 1 and (whole or "update")
    if precision == "auto":
        precision = "tf32" if device.type == "cuda" else "fp32"
    return replace(config, features=replace(features, compile=compiles, precision=precision))


def schedule(config: Config, num_tasks: int) -> TrainingConfig:
    """Return the schedule with what follows from algorithm and logging, and as many episodes for each of the tasks."""
    training, num_tasks = config.training, max(1, num_tasks)
    return replace(
        training,
        eval_interval=config.logging.log_freq or training.eval_interval,
        eval_episodes=num_tasks * math.ceil(training.eval_episodes / num_tasks),
        final_eval_episodes=num_tasks * math.ceil(training.final_eval_episodes / num_tasks),
        num_train_steps=training.num_train_steps or config.algo.num_updates,
    )


def _own_share(config: Config) -> Config:
    """Return the configuration of one of the processes that learn together: totals are split equally."""
    if distributed.world_size() == 1:
        return config
    algo: Any = config.algo
    if config.algorithm.shared_fields is None:
        raise ConfigError(f"algo.name {algo.name} learns in one process; start it without torchrun.")
    for name, share in config.algorithm.shared_fields.items():
        if getattr(algo, name) is not None:
            algo = replace(algo, **{name: share(getattr(algo, name), f"algo.{name}")})
    return replace(config, task=config.task.share(), algo=algo)


def load_content(source: Path) -> tuple[Path, dict[str, Any]]:
    """Read the newest readable checkpoint of a run directory, or one checkpoint file; returns its path too."""
    if not source.is_dir():
        return source, checkpoint.load(source)
    directory = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    path, content, problems = checkpoint.load_newest(directory, checkpoint.load)
    for problem in problems:
        logging.getLogger("apexrl").warning("%s %s is used, the newest that can be read.", problem, path.name)
    return path, content


def _load_weights(policy: Policy, source: Path, env: VecEnv) -> None:
    try:
        path, content = load_content(source)
        checkpoint.load_module(policy, with_adapters(policy, content["policy"]), path)
    except (CheckpointError, OSError) as error:
        env.close()
        problem = f"{source} cannot be read: {error.strerror}." if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"training.init_from: {problem}") from error


def make_policy(
    cfg: PolicyConfig | VLAConfig, env: VecEnv, device: torch.device, algo: AlgorithmConfig | None = None
) -> Policy:
    """Create the policy of a configuration for an environment's spaces; for PPO when no algorithm is given."""
    algo = algo or PPOConfig()
    algorithm = algorithm_class(algo.name)
    kind, needs_value = algorithm.policy_class(cfg.kind), VALUE in algorithm.required_keys
    own, kwargs = (cfg.own_class, cfg.kwargs) if isinstance(cfg, PolicyConfig) else (None, {})
    what = (
        f"policy.kwargs {kwargs} cannot be given to {cfg.kind}"
        if kwargs
        else f"policy.kind {cfg.kind} cannot be created"
    )
    with creating(what, own or kind):
        return kind.from_config(cfg, env, algorithm.critic_options(algo), needs_value=needs_value).to(device)


def prepare_device(config: Config) -> torch.device:
    """Return the device of a configuration and set the number of threads."""
    if config.training.num_threads:
        torch.set_num_threads(config.training.num_threads)
    name = config.training.device
    if name == "auto":
        return distributed.own_device(find_device())
    return usable_device(name, "training.device")


def usable_device(name: str, field: str) -> torch.device:
    """Return the device that a field names, or raise a ConfigError where it cannot be used."""
    try:
        device = torch.device(name)
        if name == "cuda":
            device = distributed.own_device(device)
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"{field} '{name}' cannot be used here; use cpu. {str(error).splitlines()[0]}") from error
    return device
