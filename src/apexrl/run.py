"""From a configuration to a running trainer: new runs, resumed runs, and trained policies."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from apexrl import distributed, files
from apexrl.agent import Trainer, checkpoint
from apexrl.agent.recipe import in_python, read_recipe
from apexrl.agent.trainer import env_seed
from apexrl.algorithms import ALGORITHMS, AlgorithmConfig, BaseAlgorithm, BCConfig, PPOConfig, PPOROAConfig, RLOOConfig
from apexrl.algorithms.base import find_device
from apexrl.collectors import (
    AsyncCollector,
    BaseCollector,
    RayCollector,
    RolloutGenerator,
    SuiteRunner,
    SyncCollector,
)
from apexrl.config import Config, make_config, read_config, with_overrides
from apexrl.demos import Plans
from apexrl.envs import VecEnv, make_env
from apexrl.envs.suite_env import SuiteVecEnv
from apexrl.envs.suites.base import TaskSuite
from apexrl.errors import ApexRLError, CheckpointError, ConfigError, EnvError, RunDirError
from apexrl.graphs import Acceleration
from apexrl.loggers import JsonlLogger, Logger, TensorBoardLogger, WandbLogger, cut_json_lines
from apexrl.metrics import EpisodeMetrics
from apexrl.policies import Policy, SACPolicy, VLAPolicy
from apexrl.policies.vla.lora import with_adapters
from apexrl.provenance import add_start
from apexrl.sections import PolicyConfig, SuiteConfig, VLAConfig
from apexrl.suite_run import (
    FINAL_RESULTS,
    IMITATION,
    SuiteResults,
    explore_with,
    imitates_first,
    imitation_config,
    make_suite_collector,
    make_suite_env,
    needs_own_demos,
    record_own_demos,
    suite_training,
    write_final_results,
)
from apexrl.types import VALUE

# What may change when a run goes on: how long, how often, and where to; not what is learned.
RESUMABLE_SECTIONS = ("training", "logging", "features")
RESUMABLE_FIELDS = ("algo.save_replay",)
FIXED_FIELDS = ("training.seed", "training.init_from")


def start(config: Config, run_dir: Path | None, loggers: Sequence[Logger] = (), *, name: str = "run") -> Trainer:
    """Make a trainer in a new run directory, which gets the whole configuration.

    Args:
        config: of the run.
        run_dir: a directory that is empty or not there yet; None makes ``runs/<name>-<time>``.
        loggers: more places for the numbers, besides the files of the run.
        name: used when ``run_dir`` is None.
    """
    distributed.join(prepare_device(config))
    made = run_dir is None or not run_dir.exists()
    run_dir = distributed.on_first(lambda: claim(new_run_dir(name) if run_dir is None else run_dir))
    lock = files.DirectoryLock(run_dir)
    distributed.on_first(lock.acquire)
    trainer = None
    try:
        distributed.on_first(lambda: _write_config(run_dir, config))
        init_from = first_weights(config, run_dir, loggers)
        trainer = make_trainer(config, run_dir, loggers, init_from=init_from)
        trainer.loggers[:0] = file_loggers(config, run_dir)
        trainer.run_lock = lock
        if isinstance(config.algo, PPOROAConfig) and config.algo.phase == "finetune" and not config.training.init_from:
            trainer.tell(
                "algo.phase finetune without training.init_from: encoder and teacher are untrained and stay so. Name a "
                "run of phase train."
            )
        distributed.on_first(partial(add_start, run_dir, 0, trainer.policy.device))
    except BaseException as error:
        if trainer is not None:
            trainer.close()
        stopped = isinstance(error, KeyboardInterrupt | SystemExit) and needs_own_demos(config)
        is_kept = stopped or (run_dir / IMITATION).exists()
        if distributed.is_first() and not is_kept:
            _clear(run_dir)
        lock.release()
        if distributed.is_first() and made and not is_kept:
            with contextlib.suppress(OSError):  # another process may still be leaving; it must not hide what went wrong
                run_dir.rmdir()
        raise
    return trainer


def _clear(run_dir: Path) -> None:
    """Delete what a failed start wrote into a directory that was empty."""
    for path in run_dir.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def new_run_dir(name: str) -> Path:
    """Make a directory ``runs/<name>-<time>`` of its own, also for runs that start in the same second."""
    stem = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        run_dir = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        try:
            run_dir.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RunDirError(f"{run_dir} cannot be made: {error.strerror}. Name another with --run-dir.") from error
        return run_dir
    raise AssertionError("unreachable")


def first_weights(config: Config, run_dir: Path, loggers: Sequence[Logger]) -> str:
    """Return the run or checkpoint that a new run takes its first weights from; an empty string draws them.

    Where the configuration asks for it, demonstrations are recorded and imitated first, which may take minutes. What
    was done before a kill is not done again: neither tasks that are recorded, nor updates before the last checkpoint.
    """

    def tell(text: str) -> None:
        for logger in loggers:
            logger.message(text)

    task, algo = config.task, config.algo
    if isinstance(algo, RLOOConfig) and imitates_first(config):
        # What is wrong with the run itself is better said now than after the imitation.
        make_trainer(replace(config, algo=replace(algo, imitation_coef=0.0)), run_dir).close()
    try:
        if isinstance(task, SuiteConfig) and needs_own_demos(config):
            distributed.on_first(lambda: record_own_demos(task, run_dir, tell))
        if not imitates_first(config):
            return config.training.init_from
        return str(_imitate(imitation_config(config, run_dir), run_dir / IMITATION, loggers, tell))
    except (KeyboardInterrupt, SystemExit):
        tell(f"Stopped before the first rollout. Resume with: apexrl train --resume {run_dir}")
        raise


def _imitate(config: Config, run_dir: Path, loggers: Sequence[Logger], tell: Callable[[str], None]) -> Path:
    """Train the imitation that a run begins with, a run in its directory; returns that when it is complete."""
    if (run_dir / FINAL_RESULTS).is_file():
        return run_dir
    if distributed.world_size() > 1:
        raise ConfigError(
            f"algo.imitation_updates is done in one process, not in {distributed.world_size()}: imitate first with "
            "--algo.name bc, without torchrun, and name that run with training.init_from."
        )
    assert isinstance(config.algo, BCConfig)
    tell(f"Imitating the demonstrations: {config.algo.num_updates:,} updates, in {run_dir}")
    loggers = [logger for logger in loggers if logger.shows_stages]
    has_begun = (run_dir / "config.yaml").is_file()
    trainer = _resume(config, run_dir, loggers) if has_begun else start(config, run_dir, loggers)
    try:
        trainer.learn()
        if episodes := trainer.cfg.final_eval_episodes:
            tell(f"After imitation: {trainer.evaluate(episodes).summary()}")
        write_final_results(run_dir, trainer.iteration, trainer.total_steps, trainer.optimizer_steps)
    finally:
        trainer.close()
    return run_dir


def resume(run_dir: Path, overrides: Iterable[tuple[str, str]] = (), loggers: Sequence[Logger] = ()) -> Trainer:
    """Go on from the newest checkpoint of a run that can be read, or from the start when it has none yet.

    Log lines after the checkpoint are dropped, because they are written again. Nothing changes when this fails.
    """
    return _resume(resumed_config(run_dir, overrides), run_dir, loggers)


def _resume(config: Config, run_dir: Path, loggers: Sequence[Logger]) -> Trainer:
    distributed.join(prepare_device(config))
    lock = files.DirectoryLock(run_dir)
    distributed.on_first(lock.acquire)
    trainer = None
    try:
        has_any = bool(checkpoint.numbered(run_dir / "checkpoints"))
        init_from = "" if has_any else first_weights(config, run_dir, loggers)
        trainer = make_trainer(config, run_dir, loggers, init_from=init_from)
        trainer.run_lock = lock
        if has_any:
            _load_newest(trainer, run_dir / "checkpoints")
        trainer.loggers[:0] = file_loggers(config, run_dir, purge_step=trainer.total_steps + 1 if has_any else 0)
        distributed.on_first(partial(_tidy, run_dir, config, trainer))
    except BaseException:
        if trainer is not None:
            trainer.close()
        lock.release()
        raise
    return trainer


def _load_newest(trainer: Trainer, directory: Path) -> None:
    """Load the newest checkpoint that can be read; newer ones get another name, so that nobody meets them again."""
    newest, _, problems = checkpoint.load_newest(directory, lambda path: trainer.load_checkpoint(path.name))
    trainer.adopt_checkpoints()
    for problem in problems:
        trainer.tell(f"{problem} Going on from {newest.name}, the newest that can be read.")
    if problems and distributed.is_first():
        for path in checkpoint.numbered(directory)[-len(problems) :]:
            path.rename(path.with_name(f"{path.name}.damaged"))


def _tidy(run_dir: Path, config: Config, trainer: Trainer) -> None:
    """Take back what the run had written after its checkpoint."""
    for directory in (run_dir, run_dir / "checkpoints"):
        files.remove_parts(directory)
    cut_json_lines(run_dir / "metrics.jsonl", trainer.iteration)
    # The checkpoint knows how many evaluations came before it: the one at the end of training came after.
    cut_json_lines(run_dir / "evaluations.jsonl", trainer.iteration, max_lines=trainer.num_evaluations)
    _write_config(run_dir, config)
    add_start(run_dir, trainer.iteration, trainer.policy.device)


def resumed_config(run_dir: Path, overrides: Iterable[tuple[str, str]] = ()) -> Config:
    """Read a run's configuration and apply what may change; what may not can be repeated as it is."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise RunDirError(
            f"{run_dir} is not a run directory: it has no config.yaml. Name one that 'apexrl train' made."
        )
    return changed_config(read_config(path), list(overrides))


def changed_config(stored: Mapping[str, Any], overrides: Sequence[tuple[str, str]]) -> Config:
    """Apply overrides to the configuration of a run that exists; refuses what may not change."""
    before, after = make_config(stored), make_config(with_overrides(stored, overrides))
    collectors = {before.training.collector, after.training.collector}
    if len(collectors) > 1 and "ray" in collectors:
        raise ConfigError(
            f"training.collector cannot change between '{before.training.collector}' and '{after.training.collector}' "
            "when a run is resumed: the environments live elsewhere. Leave it out, or start a new run."
        )
    for name, text in overrides:
        section, key, *_ = name.split(".")
        is_fixed = (section not in RESUMABLE_SECTIONS and name not in RESUMABLE_FIELDS) or name in FIXED_FIELDS
        if is_fixed and getattr(getattr(before, section), key) != getattr(getattr(after, section), key):
            raise ConfigError(
                f"'--{name} {text}' cannot change when a run is resumed; only {', '.join(RESUMABLE_SECTIONS)} can "
                f"(not {' and '.join(FIXED_FIELDS)}). Leave it out, or start a new run."
            )
    return after


def file_loggers(config: Config, run_dir: Path, purge_step: int | None = None) -> list[Logger]:
    """Make the loggers that write into the run directory; with ``purge_step`` TensorBoard hides what came later."""
    if not distributed.is_first():
        return []
    files: list[Logger] = [JsonlLogger(run_dir / "metrics.jsonl")]
    # Weights & Biases may refuse to start, so it comes before TensorBoard, which makes a file at once.
    if config.logging.wandb != "disabled":
        files.append(
            WandbLogger(
                run_dir,
                project=config.logging.wandb_project,
                mode=config.logging.wandb,
                run_id=_wandb_id(run_dir),
                name=run_dir.resolve().name,
                config=config.to_dict(),
            )
        )
    if config.logging.tensorboard:
        files.append(TensorBoardLogger(run_dir, purge_step))
    return files


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


@dataclass(frozen=True)
class TrainedPolicy:
    """A policy from a checkpoint, with what is needed to run it."""

    config: Config
    policy: Policy
    device: torch.device
    checkpoint: Path
    events: frozenset[str] = frozenset()
    """Episode fields of the events that were reported in training; an evaluation counts 0 where they do not happen."""

    def make_env(self, num_envs: int) -> VecEnv:
        """Make environments of the task that it was trained on."""
        return make_task(self.config, self.device, num_envs)

    def plans(self, suite: TaskSuite, per_task: int, *, start: int = 0, num_workers: int = 1) -> Plans:
        """Let the policy act from the training states of a suite, which may show others what it does not see.

        Args:
            suite: for whose ``record_demos`` the plans are.
            per_task: successes wanted.
            start: number of the training state to begin with.
            num_workers: processes that simulate.

        Raises:
            ConfigError: when the policy is of no suite, or of one with other observations or actions.
        """
        task = self.config.task
        if not isinstance(task, SuiteConfig):
            raise ConfigError(f"{self.checkpoint} was trained on '{task.id}', which is no suite of tasks.")
        num_envs = min(task.num_parallel_envs, num_workers) if task.cameras else task.num_parallel_envs
        here = replace(
            task,
            benchmark_name=suite.name,
            task_names_to_use=tuple(suite.task_names),
            num_parallel_envs=num_envs,
            num_workers=min(num_workers, num_envs),
            max_cached_envs=None,
            max_episode_length=suite.horizon,
        )
        env, known = make_suite_env(here, self.device), make_suite_env(task, self.device)
        if (env.observation_space, env.action_space) != (known.observation_space, known.action_space):
            raise ConfigError(
                f"{self.checkpoint} was trained on '{task.id}' and cannot act on '{suite.name}', whose observations or "
                "actions are others."
            )
        states = [suite.init_states(task_id, "train")[start:] for task_id in range(suite.num_tasks)]
        with contextlib.closing(env):
            found = SuiteRunner(env, self.policy).plans(states, per_task)
        return [{start + number: plan for number, plan in plans.items()} for plans in found]


def load_trained(source: Path) -> TrainedPolicy:
    """Load the newest checkpoint of a run directory, or one checkpoint file."""
    source, content = _load_content(source)
    recipe = None if content["config"] else read_recipe(content, source)
    try:
        config = make_config(content["config"] if recipe is None else recipe.config)
    except ConfigError as error:
        raise CheckpointError(f"{source} cannot be used: its 'config' does not fit: {error}") from error
    try:
        device = prepare_device(config)
    except ConfigError:  # trained on a device that this machine does not have
        device = find_device()
    try:
        env = make_task(config, device, 1)
    except EnvError as error:
        if recipe is None:
            raise
        raise CheckpointError(f"{source} cannot be used here: {error} Or {in_python(source)}") from error
    if recipe is None:
        policy = make_policy(config.policy, env, device, config.algo)
    else:
        policy = recipe.make_policy(env).to(device)
    env.close()
    checkpoint.load_module(policy, content["policy"], source)
    policy.eval()
    episodes = EpisodeMetrics()
    if "episode_metrics" in content["collector"]:
        episodes.load_state_dict(content["collector"]["episode_metrics"], torch.device("cpu"))
    return TrainedPolicy(config, policy, device, source, frozenset(episodes.events()))


def _load_content(source: Path) -> tuple[Path, dict[str, Any]]:
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
        path, content = _load_content(source)
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


def claim(run_dir: Path) -> Path:
    """Make sure that a new run overwrites nothing and can be written; returns its directory."""
    if run_dir.exists() and not run_dir.is_dir():
        raise RunDirError(f"--run-dir {run_dir} is a file; name a new directory.")
    leftovers = (files.DirectoryLock.NAME, f".config.yaml{files.PART}")  # of a process that was killed as it began
    if run_dir.is_dir() and any(path.name not in leftovers for path in run_dir.iterdir()):
        raise RunDirError(f"--run-dir {run_dir} is not empty; name a new directory, or use --resume {run_dir}.")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirError(f"--run-dir {run_dir} cannot be made: {error.strerror}; name another directory.") from error
    if not os.access(run_dir, os.W_OK):
        raise RunDirError(f"--run-dir {run_dir} cannot be written; name another directory.")
    return run_dir


def _wandb_id(run_dir: Path) -> str:
    """Return an id that stays with the run directory and that no other run has."""
    path = run_dir / "wandb_id.txt"
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text().strip()


def _write_config(run_dir: Path, config: Config) -> None:
    files.replace_text(run_dir / "config.yaml", yaml.safe_dump(config.to_dict(), sort_keys=False))
