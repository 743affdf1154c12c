"""From a configuration to environments, policy, algorithm and trainer."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apexrl.agent import Trainer, checkpoint
from apexrl.agent.loggers import Logger
from apexrl.agent.trainer import env_seed
from apexrl.algorithms import ALGORITHMS, AlgorithmConfig, BaseAlgorithm, PPOConfig, RLOOConfig
from apexrl.algorithms.base import find_device
from apexrl.collectors import AsyncCollector, BaseCollector, RayCollector, RolloutGenerator, SyncCollector
from apexrl.core.errors import ApexRLError, CheckpointError, ConfigError, EnvError
from apexrl.core.system import distributed
from apexrl.core.system.acceleration import Acceleration
from apexrl.core.types import VALUE
from apexrl.envs import VecEnv, make_env
from apexrl.envs.suites.env import SuiteVecEnv
from apexrl.policies import Policy, SACPolicy, VLAPolicy
from apexrl.policies.vla.lora import with_adapters
from apexrl.run.config import Config
from apexrl.run.sections import PolicyConfig, SuiteConfig, VLAConfig
from apexrl.run.suite import SuiteResults, explore_with, make_suite_collector, make_suite_env, suite_training


def make_trainer(config: Config, run_dir: Path, loggers: Sequence[Logger] = (), *, init_from: str = "") -> Trainer:
    """Make environment, policy, algorithm and trainer for a configuration; ``file_loggers`` are added apart.

    Args:
        config: of the run.
        run_dir: of the run.
        loggers: where the numbers go.
        init_from: a run directory or checkpoint with the first weights of the policy; empty draws them.
    """
    device = prepare_device(config)
    whole, config = config, _own_share(config)
    torch.manual_seed(config.training.seed)
    random.seed(config.training.seed)
    np.random.seed(config.training.seed)
    # Ray's workers make their own; here one is enough, for the spaces and to make others for evaluation.
    env = make_task(config, device, 1 if config.training.collector == "ray" else None)
    policy = make_policy(config.policy, env, device, config.algo)
    if init_from:
        # Before the algorithm is made, which may copy weights from one network to another.
        _start_from(policy, Path(init_from), env)
        if isinstance(config.algo, RLOOConfig):
            explore_with(policy, config.policy.init_std)
    make: Any = ALGORITHMS[config.algo.name][0]
    features = config.features
    acceleration = Acceleration(graphs=features.graphs, compile=features.compile, precision=features.precision)
    acceleration.apply()
    in_background = config.training.collector == "async"
    if in_background or distributed.world_size() > 1:
        # A graph must not be captured while another thread uses the device, nor with an exchange between processes.
        acceleration = replace(acceleration, graphs=False)
    if distributed.world_size() > 1:
        acceleration = replace(acceleration, compile=False)
    algorithm: BaseAlgorithm = make(policy=policy, cfg=config.algo, acceleration=acceleration)
    if init_from and isinstance(policy, SACPolicy):
        policy.acts_uniformly.fill_(False)  # it explores better than chance
    loggers = list(loggers)
    training = config.training
    if isinstance(config.task, SuiteConfig):
        training = suite_training(training, config.logging.log_freq, config.algo, len(env.task_names))
        loggers.append(SuiteResults(run_dir))
    trainer = Trainer(
        env,
        policy,
        algorithm,
        training,
        collector=_make_collector(config, env, algorithm, acceleration, run_dir),
        loggers=loggers,
        run_dir=run_dir,
        save_dir=run_dir / "checkpoints",
        log_interval=config.logging.log_interval,
        log_reward_components=config.logging.reward_components,
        save_step_csv=config.features.save_step_csv,
        config=whole.to_dict(),
    )
    if distributed.world_size() > 1 and ((features.graphs and device.type == "cuda") or features.compile):
        trainer.tell(f"{distributed.world_size()} processes learn: CUDA graphs and compilation are switched off.")
    elif in_background and features.graphs and device.type == "cuda":
        trainer.tell("training.collector async switches CUDA graphs off: another thread uses the device.")
    if isinstance(trainer.collector, RolloutGenerator | AsyncCollector | RayCollector):
        trainer.collector.on_message = trainer.tell
    return trainer


def _own_share(config: Config) -> Config:
    """Return the configuration of one of the processes that learn together: totals are split equally."""
    if distributed.world_size() == 1:
        return config
    algorithm = ALGORITHMS[config.algo.name][0]
    task: Any = config.task
    algo: Any = config.algo
    if algorithm.shared_fields is None:
        raise ConfigError(
            f"algo.name {algo.name} learns in one process, not in {distributed.world_size()}; start it without "
            "torchrun."
        )
    for name, share in algorithm.shared_fields.items():
        if getattr(algo, name) is not None:
            algo = replace(algo, **{name: share(getattr(algo, name), f"algo.{name}")})
    num_envs = "num_parallel_envs" if isinstance(task, SuiteConfig) else "num_envs"
    workers = task.num_workers and -(-task.num_workers // distributed.world_size())
    own = {num_envs: distributed.share(task.num_envs, f"task.{num_envs}"), "num_workers": workers}
    return replace(config, task=replace(task, **own), algo=algo)


def _make_collector(
    config: Config, env: VecEnv, algorithm: BaseAlgorithm, acceleration: Acceleration, run_dir: Path
) -> BaseCollector:
    acting, keep = algorithm.rollout_policy, algorithm.required_keys
    seed = env_seed(config.training.seed)
    if isinstance(config.task, SuiteConfig):
        assert isinstance(env, SuiteVecEnv)
        starts_new = not config.training.init_from
        made = make_suite_collector(
            config.task, algorithm, config.algo, env, seed=seed, run_dir=run_dir, starts_new=starts_new
        )
        if config.training.collector == "sync":
            return made
        assert isinstance(made, RolloutGenerator)
        return AsyncCollector(env, acting, generator=made, max_staleness=config.training.max_staleness)
    if config.training.collector == "ray":
        if distributed.world_size() > 1:
            raise ConfigError("training.collector ray needs one learning process; start it without torchrun.")
        count = config.training.num_collectors
        return RayCollector(
            partial(make_task, config, torch.device("cpu"), config.task.num_envs // count),
            acting,
            keep=keep,
            seed=seed,
            num_workers=count,
            max_staleness=config.training.max_staleness,
        )
    if config.training.collector == "async":
        return AsyncCollector(
            env,
            acting,
            keep=keep,
            seed=seed,
            max_staleness=config.training.max_staleness,
            step_timeout=config.training.step_timeout,
            acceleration=acceleration,
        )
    return SyncCollector(env, acting, keep=keep, seed=seed, acceleration=acceleration)


def load_content(source: Path) -> tuple[Path, dict[str, Any]]:
    """Read the newest readable checkpoint of a run directory, or one checkpoint file; returns its path too."""
    if not source.is_dir():
        return source, checkpoint.load(source)
    directory = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    path, content, problems = checkpoint.load_newest(directory, checkpoint.load)
    for problem in problems:
        logging.getLogger("apexrl").warning("%s %s is used, the newest that can be read.", problem, path.name)
    return path, content


def _start_from(policy: Policy, source: Path, env: VecEnv) -> None:
    """Give a policy the weights of a checkpoint."""
    try:
        path, content = load_content(source)
        state = content["policy"]
        if isinstance(policy, VLAPolicy):
            state = with_adapters(policy, state)
        checkpoint.load_module(policy, state, path)
    except (CheckpointError, OSError) as error:
        env.close()
        problem = f"{source} cannot be read: {error.strerror}." if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"training.init_from: {problem}") from error


def make_task(config: Config, device: torch.device, num_envs: int | None = None) -> VecEnv:
    """Make the environments of a configuration."""
    task = config.task
    if isinstance(task, SuiteConfig):
        return make_suite_env(task, device, num_envs)
    count = num_envs or task.num_envs
    workers = min(task.num_workers, count)
    try:
        return make_env(task.id, count, device=device, num_workers=workers, metrics=task.metric_specs, **task.kwargs)
    except EnvError as error:
        raise EnvError(f"task.id {task.id}: {error}") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, ApexRLError) or not task.kwargs:
            raise
        raise ConfigError(f"task.kwargs {task.kwargs} cannot be given to '{task.id}': {error}.") from error


def make_policy(
    cfg: PolicyConfig | VLAConfig, env: VecEnv, device: torch.device, algo: AlgorithmConfig | None = None
) -> Policy:
    """Make the policy of a configuration for an environment's spaces; for PPO when no algorithm is given."""
    algo = algo or PPOConfig()
    algorithm = ALGORITHMS[algo.name][0]
    if isinstance(cfg, VLAConfig):
        options = {**_vla_options(cfg), "chunk": getattr(env, "chunk", 1)}
        options["value_head"] = VALUE in algorithm.required_keys
        return algorithm.policies[cfg.kind].for_env(env, **options).to(device)
    if cfg.kind == "roa" and (cfg.actor_groups is not None or cfg.memory_dim != PolicyConfig.memory_dim):
        raise ConfigError(
            f"policy.actor_groups must be null and policy.memory_dim {PolicyConfig.memory_dim} with policy.kind roa, "
            f"which reads neither; got {cfg.actor_groups and list(cfg.actor_groups)} and {cfg.memory_dim}."
        )
    policy = algorithm.policies[cfg.kind].for_env(env, **_policy_options(cfg, algorithm.critic_options(algo)))
    return policy.to(device)


def _vla_options(cfg: VLAConfig) -> dict[str, Any]:
    return {
        "size": cfg.size,
        "width": cfg.width,
        "depth": cfg.depth,
        "heads": cfg.heads,
        "head": cfg.head,
        "distribution": cfg.distribution,
        "init_std": cfg.init_std,
        "learn_std": cfg.learn_std,
        "denoising_steps": cfg.denoising_steps,
        "noise": cfg.noise,
        "noise_level": cfg.noise_level,
        "guidance": cfg.guidance,
        "lora_rank": cfg.lora_rank,
        "freeze": cfg.freeze,
    }


def _policy_options(cfg: PolicyConfig, critic_options: Mapping[str, Any]) -> dict[str, Any]:
    head = {
        "distribution": cfg.distribution,
        "init_std": cfg.init_std,
        "min_std": cfg.min_std,
        "max_std": cfg.max_std,
        "state_dependent_std": cfg.state_dependent_std,
        "gsde": cfg.gsde,
        "gsde_interval": cfg.gsde_interval,
    }
    layers = {"hidden_dims": cfg.hidden_dims, "activation": cfg.activation}
    critic_cfg = {
        "hidden_dims": cfg.hidden_dims if cfg.critic_hidden_dims is None else cfg.critic_hidden_dims,
        "activation": cfg.activation,
        "groups": cfg.critic_groups,
        **critic_options,
    }
    options: dict[str, dict[str, Any]] = {
        "mlp": {"actor_cfg": {**layers, "groups": cfg.actor_groups, **head}, "critic_cfg": critic_cfg},
        "gru": {
            **layers,
            "groups": cfg.actor_groups,
            "memory_dim": cfg.memory_dim,
            "critic_groups": cfg.critic_groups,
            "critic_hidden_dims": critic_cfg["hidden_dims"],
            **head,
        },
        "roa": {
            **layers,
            "critic_cfg": critic_cfg,
            "history": cfg.history,
            "history_kind": cfg.history_kind,
            "num_features": cfg.latent_dim,
            "encoder_dims": cfg.encoder_dims,
            "adapt_dims": cfg.adapt_dims,
            "head_options": head,
        },
    }
    return {**options[cfg.kind], "normalize_obs": cfg.normalize_obs}


def prepare_device(config: Config) -> torch.device:
    """Return the device of a configuration and set the number of threads."""
    if config.training.num_threads:
        torch.set_num_threads(config.training.num_threads)
    name = config.training.device
    if name == "auto":
        return distributed.own_device(find_device())
    try:
        device = torch.device(name)
        if name == "cuda":
            device = distributed.own_device(device)
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"training.device '{name}' cannot be used here; use auto or cpu. {str(error).splitlines()[0]}"
        ) from error
    return device
