"""From a configuration to a running trainer: new runs, resumed runs, and trained policies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from apexrl.agent import Trainer, checkpoint
from apexrl.agent.on_policy_runner import find_device
from apexrl.algorithms import ALGORITHMS
from apexrl.config import Config, PolicyConfig, make_config, parse_yaml, with_overrides
from apexrl.envs import VecEnv, make_env
from apexrl.errors import ApexRLError, ConfigError, RunDirError
from apexrl.loggers import JsonlLogger, Logger, TensorBoardLogger, WandbLogger, cut_json_lines
from apexrl.policies import ActorCritic, Policy, RecurrentActorCritic

# What may change when a run goes on: how long, how often, and where to; not what is learned.
RESUMABLE_SECTIONS = ("training", "logging", "features")


def start(config: Config, run_dir: Path, loggers: Sequence[Logger] = ()) -> Trainer:
    """Make a trainer in a new run directory, which gets the whole configuration."""
    _claim(run_dir)
    _write_config(run_dir, config)
    try:
        return make_trainer(config, run_dir, loggers)
    except ApexRLError:
        (run_dir / "config.yaml").unlink()
        run_dir.rmdir()
        raise


def resume(run_dir: Path, overrides: Iterable[tuple[str, str]] = (), loggers: Sequence[Logger] = ()) -> Trainer:
    """Go on from the newest checkpoint of a run, or from the start when it has none yet.

    Log lines after the checkpoint are dropped, because they are written again.
    """
    config = resumed_config(run_dir, overrides)
    paths = checkpoint.numbered(run_dir / "checkpoints")
    content = checkpoint.load(paths[-1]) if paths else {"iteration": 0, "total_steps": 0}
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        cut_json_lines(run_dir / name, content["iteration"])
    trainer = make_trainer(config, run_dir, loggers, purge_step=content["total_steps"] + 1)
    if paths:
        trainer.load_checkpoint(paths[-1].resolve())
    _write_config(run_dir, config)
    return trainer


def resumed_config(run_dir: Path, overrides: Iterable[tuple[str, str]] = ()) -> Config:
    """Read a run's configuration and apply what may change."""
    overrides = list(overrides)
    for name, _ in overrides:
        if name.split(".")[0] not in RESUMABLE_SECTIONS or name == "training.seed":
            raise ConfigError(
                f"'--{name}' cannot change when a run is resumed; only {', '.join(RESUMABLE_SECTIONS)} can "
                "(not training.seed). Start a new run instead."
            )
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise RunDirError(f"{run_dir} is not a run directory: it has no config.yaml.")
    return make_config(with_overrides(parse_yaml(path.read_text(), str(path)), overrides))


def make_trainer(
    config: Config, run_dir: Path, loggers: Sequence[Logger] = (), purge_step: int | None = None
) -> Trainer:
    """Make environment, policy, algorithm and loggers for a configuration."""
    device = prepare_device(config)
    torch.manual_seed(config.training.seed)
    env = make_task(config, device)
    policy = make_policy(config.policy, env, device)
    make: Any = ALGORITHMS[config.algo.name][0]
    algorithm = make(policy=policy, cfg=config.algo)
    files: list[Logger] = [JsonlLogger(run_dir / "metrics.jsonl")]
    if config.logging.tensorboard:
        files.append(TensorBoardLogger(run_dir, purge_step))
    if config.logging.wandb != "disabled":
        files.append(
            WandbLogger(
                run_dir,
                project=config.logging.wandb_project,
                mode=config.logging.wandb,
                run_id=run_dir.name,
                config=config.to_dict(),
            )
        )
    return Trainer(
        env,
        policy,
        algorithm,
        config.training,
        loggers=[*files, *loggers],
        run_dir=run_dir,
        save_dir=run_dir / "checkpoints",
        log_interval=config.logging.log_interval,
        log_reward_components=config.logging.reward_components,
        save_step_csv=config.features.save_step_csv,
        config=config.to_dict(),
    )


@dataclass(frozen=True)
class TrainedPolicy:
    """A policy from a checkpoint, with what is needed to run it."""

    config: Config
    policy: Policy
    device: torch.device
    checkpoint: Path

    def make_env(self, num_envs: int) -> VecEnv:
        """Make environments of the task that it was trained on."""
        return make_task(self.config, self.device, num_envs)


def load_trained(source: Path) -> TrainedPolicy:
    """Load the newest checkpoint of a run directory, or one checkpoint file."""
    if source.is_dir():
        directory = source / "checkpoints" if (source / "checkpoints").is_dir() else source
        source = checkpoint.latest(directory)
    content = checkpoint.load(source)
    if not content["config"]:
        raise ConfigError(f"{source} holds no configuration: it was saved by a runner, not by 'apexrl train'.")
    config = make_config(content["config"])
    device = prepare_device(config)
    env = make_task(config, device, 1)
    policy = make_policy(config.policy, env, device)
    env.close()
    checkpoint.load_module(policy, content["policy"], source)
    policy.eval()
    return TrainedPolicy(config, policy, device, source)


def make_task(config: Config, device: torch.device, num_envs: int | None = None) -> VecEnv:
    """Make the environments of a configuration."""
    count = num_envs or config.task.num_envs
    workers = min(config.task.num_workers, count)
    return make_env(config.task.id, count, device=device, num_workers=workers, **config.task.kwargs)


def make_policy(cfg: PolicyConfig, env: VecEnv, device: torch.device) -> Policy:
    """Make the policy of a configuration for an environment's spaces."""
    head = {
        "distribution": cfg.distribution,
        "init_std": cfg.init_std,
        "min_std": cfg.min_std,
        "max_std": cfg.max_std,
        "state_dependent_std": cfg.state_dependent_std,
    }
    if cfg.kind == "gru":
        return RecurrentActorCritic.for_env(
            env,
            hidden_dims=cfg.hidden_dims,
            memory_dim=cfg.memory_dim,
            activation=cfg.activation,
            groups=cfg.actor_groups,
            normalize_obs=cfg.normalize_obs,
            **head,
        ).to(device)
    actor_cfg = {
        "hidden_dims": cfg.hidden_dims,
        "activation": cfg.activation,
        "groups": cfg.actor_groups,
        **head,
    }
    critic_dims = cfg.hidden_dims if cfg.critic_hidden_dims is None else cfg.critic_hidden_dims
    critic_cfg = {"hidden_dims": critic_dims, "activation": cfg.activation, "groups": cfg.critic_groups}
    return ActorCritic.for_env(env, actor_cfg=actor_cfg, critic_cfg=critic_cfg, normalize_obs=cfg.normalize_obs).to(
        device
    )


def prepare_device(config: Config) -> torch.device:
    """Return the device of a configuration and set the number of threads."""
    if config.training.num_threads:
        torch.set_num_threads(config.training.num_threads)
    name = config.training.device
    if name == "auto":
        return find_device()
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"training.device '{name}' cannot be used here; use auto or cpu. {str(error).splitlines()[0]}"
        ) from error
    return device


def _claim(run_dir: Path) -> None:
    """Make sure that a new run overwrites nothing and can be written."""
    if run_dir.exists() and not run_dir.is_dir():
        raise RunDirError(f"--run-dir {run_dir} is a file; name a new directory.")
    if run_dir.is_dir() and any(run_dir.iterdir()):
        raise RunDirError(f"--run-dir {run_dir} is not empty; name a new directory, or use --resume {run_dir}.")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirError(f"--run-dir {run_dir} cannot be made: {error.strerror}.") from error
    if not os.access(run_dir, os.W_OK):
        raise RunDirError(f"--run-dir {run_dir} cannot be written; name another directory.")


def _write_config(run_dir: Path, config: Config) -> None:
    temporary = run_dir / ".config.yaml.part"
    temporary.write_text(yaml.safe_dump(config.to_dict(), sort_keys=False))
    temporary.replace(run_dir / "config.yaml")
