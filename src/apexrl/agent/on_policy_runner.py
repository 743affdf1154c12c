"""A trainer made from actor and critic classes, or from a ready-made agent."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl.agent.loggers import Logger
from apexrl.agent.trainer import Trainer, TrainingConfig
from apexrl.algorithms import ALGORITHMS, BaseAlgorithm
from apexrl.algorithms.base import find_device
from apexrl.core.errors import ConfigError, did_you_mean
from apexrl.core.metrics import EpisodeMetrics, fold_episodes
from apexrl.core.observations import leaves
from apexrl.core.system import files
from apexrl.core.types import ACTION, NEXT_VALUE, OBSERVATION, SAMPLE_LOG_PROB, VALUE, Actor, Carry, Observation
from apexrl.envs import VecEnv, as_vec_env
from apexrl.envs.base import RunningEpisodes
from apexrl.evaluation.evaluate import EvaluationResult, StepRows
from apexrl.evaluation.step_csv import extend_rows, save_step_csvs
from apexrl.policies.base import Policy
from apexrl.policies.networks import MLPActor, MLPCritic
from apexrl.rollout import continued, make_actor, new_episodes, rollout

PolicyFunction = Callable[[Observation], tuple[Tensor | None, ...] | Tensor]


class OnPolicyRunner(Trainer):
    """Trains an on-policy algorithm; the loop is the trainer's.

    Args:
        env: a ``VecEnv``, or an object that steps as ``(obs, reward, done, extras)``.
        algorithm: name of the algorithm to create, ppo or ppo_roa; not used with ``agent``.
        actor_class: class of the actor network; not for ppo_roa.
        critic_class: class of the critic network.
        actor_cfg: options of the actor, such as ``hidden_dims``; for ppo_roa those of ``ROAPolicy``.
        critic_cfg: options of the critic.
        log_dir: the run directory, with ``config.yaml``, ``metrics.jsonl``, ``evaluations.jsonl`` and TensorBoard
            events, which every command reads; None logs nothing. Where one of the two directories already holds a run,
            ``run_2`` (or ``run_3``, …) in both is used, unless ``load_checkpoint`` continues that run; this is decided
            at the first write.
        save_dir: where checkpoints go; ``checkpoints`` in ``log_dir`` when not given, and none without either.
        device: of the policy; CUDA when there is one, when not given. With ``agent`` this and the options above, from
            ``algorithm`` to ``critic_cfg``, are refused: the agent has its own.
        log_interval: iterations between logged ones; the first and the last are always logged.
        save_interval: iterations between checkpoints; 0 saves only at the end.
        log_reward_components: log what the environment declares as components of its reward.
        agent: a ready-made algorithm.
        cfg: the algorithm's configuration.
        eval_env: environments for evaluation; made from ``env`` when not given.
        eval_interval: iterations between evaluations; 0 never evaluates by itself.
        eval_episodes: episodes of each of these evaluations.
        keep_checkpoints: checkpoints saved on schedule that stay; 0 keeps all.
        save_step_csv: write one table of steps for each environment at every evaluation.
        seed: of the environments.
        training: the whole schedule, in the place of ``save_interval``, ``eval_interval``, ``eval_episodes``,
            ``keep_checkpoints`` and ``seed``.
        loggers: more places for the numbers.
        progress: show it on the console; when not given, in a terminal or a notebook.
    """

    def __init__(
        self,
        env: Any,
        algorithm: str = "ppo",
        actor_class: type[nn.Module] = MLPActor,
        critic_class: type[nn.Module] = MLPCritic,
        actor_cfg: Mapping[str, Any] | None = None,
        critic_cfg: Mapping[str, Any] | None = None,
        log_dir: str | Path | None = None,
        save_dir: str | Path | None = None,
        device: torch.device | str | None = None,
        log_interval: int = 10,
        save_interval: int = 100,
        log_reward_components: bool = True,
        agent: BaseAlgorithm | None = None,
        cfg: Any = None,
        *,
        eval_env: Any = None,
        eval_interval: int = 0,
        eval_episodes: int = 20,
        keep_checkpoints: int = 0,
        save_step_csv: bool = False,
        seed: int = 0,
        training: TrainingConfig | None = None,
        loggers: Sequence[Logger] = (),
        progress: bool | None = None,
    ) -> None:
        vec_env = as_vec_env(env)
        if agent is None:
            known = [name for name, cls in ALGORITHMS.items() if cls.on_policy and cls.learns_from == "steps"]
            if algorithm not in known:
                raise ConfigError(
                    f"Unknown algorithm '{algorithm}'; known are {known}." + did_you_mean(algorithm, known)
                )
            make: Any
            make = ALGORITHMS[algorithm]
            if cfg is not None and type(cfg) is not make.config_class:
                raise ConfigError(
                    f"algorithm '{algorithm}' needs a {make.config_class.__name__} as cfg, got {type(cfg).__name__}."
                )
            policy = make.policy_for(vec_env, actor_class, critic_class, actor_cfg, critic_cfg)
            agent = make(policy=policy.to(device or find_device()), cfg=cfg)
        else:
            given = {
                "algorithm": algorithm != "ppo",
                "actor_class": actor_class is not MLPActor,
                "critic_class": critic_class is not MLPCritic,
                "actor_cfg": actor_cfg is not None,
                "critic_cfg": critic_cfg is not None,
                "device": device is not None,
            }
            useless = [name for name, is_given in given.items() if is_given]
            if useless:
                raise ConfigError(
                    f"OnPolicyRunner got a ready-made agent, with which {', '.join(useless)} would have no effect; "
                    "leave them out, or give them to the agent."
                )
            if cfg is not None and cfg != getattr(agent, "cfg", cfg):
                raise ConfigError("OnPolicyRunner got an agent and another cfg than the agent's; leave cfg out.")
        schedule: dict[str, Any] = {
            "seed": seed,
            "save_interval": save_interval,
            "eval_interval": eval_interval,
            "eval_episodes": eval_episodes,
            "keep_checkpoints": keep_checkpoints,
        }
        if not isinstance(training, TrainingConfig | None):
            raise ConfigError(f"training must be a TrainingConfig, got {type(training).__name__}.")
        if training is not None:
            options = inspect.signature(OnPolicyRunner).parameters
            both = [name for name, value in schedule.items() if value != options[name].default]
            if both:
                raise ConfigError(
                    f"OnPolicyRunner got training, which holds the whole schedule, and {', '.join(both)}; leave one of "
                    "them out."
                )
        super().__init__(
            vec_env,
            agent.policy,
            agent,
            training or TrainingConfig(**schedule),
            eval_env=eval_env,
            loggers=loggers,
            run_dir=log_dir,
            save_dir=save_dir,
            log_interval=log_interval,
            log_reward_components=log_reward_components,
            save_step_csv=save_step_csv,
            progress=progress,
        )
        self.agent = agent
        self.eval_episode_metrics = EpisodeMetrics(keep_episodes=True)
        """Episodes of ``rollout`` in other environments than those of training."""
        self._rollout_wrappers: dict[int, VecEnv] = {}
        """Kept, because a wrapper that was made here knows the episodes that run in its simulator."""

    @property
    def envs(self) -> VecEnv:
        """The training environments."""
        return self.env

    @property
    def eval_envs(self) -> VecEnv:
        """The evaluation environments; created from the training ones when none were given."""
        envs = self._evaluation_env(self.cfg.eval_num_envs) if self.eval_env is None else self.eval_env
        self._made_eval_envs = None  # whoever holds them expects them to stay
        return envs

    @property
    def num_steps(self) -> int:
        """Steps of each environment in one rollout of training."""
        return self.algorithm.num_steps

    @property
    def episode_metrics(self) -> EpisodeMetrics:
        """Episodes of the training environments; evaluation has its own."""
        return self.collector.episode_metrics

    def eval(self, num_episodes: int = 10) -> dict[str, float]:
        """Evaluate deterministically on separate environments; returns numbers by log name."""
        return self.evaluate(num_episodes, deterministic=True).logs()

    def rollout(
        self,
        obs: Observation | Mapping[str, Tensor] | None,
        num_steps: int,
        envs: Any = None,
        policy_fn: PolicyFunction | None = None,
        collect_for_training: bool = True,
        record_step_data: bool = False,
    ) -> tuple[Observation, TensorDict | None, StepRows | None]:
        """Take steps in the training environments or in others, with the policy or any function.

        Episodes that span calls are counted whole, and ``learn`` continues those of the training environments.

        Args:
            obs: where to start: what the environments' ``reset``, or the last call of this method, returned. None
                resets the environments. Where others have stepped them since, they continue from their own state. Of a
                raw simulator with ``reset`` but no ``episode_length_buf``, give back the same object: a copy is taken
                for what a reset returned.
            num_steps: steps to take.
            envs: as ``env`` of the runner; the training environments when not given.
            policy_fn: maps observations on the policy's device to ``(action, log_prob, value)`` or ``(action, log_prob,
                entropy, value)``, of which all but the action may be None, or to the action alone; the policy that
                training samples from, ``algorithm.rollout_policy``, when not given.
            collect_for_training: return the batch that ``algorithm.update`` takes.
            record_step_data: return one row per step for each environment.

        Returns:
            The next observation, the batch ``[T, N]`` or None, and the rows by environment or None.
        """
        simulator, envs = envs, self.env if envs is None else as_vec_env(envs)
        if envs is not simulator:
            self._rollout_wrappers[id(simulator)] = envs
        policy = self.algorithm.rollout_policy
        actor = make_actor(policy, envs.device)
        if policy_fn is None:
            policy.check_fits(envs)
        else:
            actor = _actor_from(policy_fn, actor, policy.device, envs.device)
        policy.eval()
        with self.collector.quiet():
            running = _running_episodes(envs, policy, obs)
            batch, after = rollout(envs, actor, running.carry, num_steps, keep=None if collect_for_training else ())
            running.advance(after)
            running.handed_out = running.carry[OBSERVATION].clone()
            envs.running = running
        metrics = self.episode_metrics if envs is self.env else self.eval_episode_metrics
        metrics.unfinished = running.unfinished
        if envs is self.env:
            self.collector.adopt()
        fold_episodes(batch, envs.metric_specs, metrics)
        rows: StepRows | None = None
        if record_step_data:
            rows = {index: [] for index in range(envs.num_envs)}
            extend_rows(rows, batch)
        next_obs = running.handed_out
        if not collect_for_training:
            return next_obs, None, rows
        batch = batch.to(policy.device)
        with torch.no_grad():
            batch[VALUE], batch[NEXT_VALUE] = policy.values(batch)
        return next_obs, batch, rows

    def build_eval_logs(self) -> dict[str, float]:
        """Return the numbers of ``eval_episode_metrics`` since ``clear`` by log name; empty when no episode ended."""
        episodes = self.eval_episode_metrics.episodes()
        if not len(episodes.get("return", ())):
            return {}
        table = torch.stack(list(episodes.values())).cpu().numpy()
        logs = EvaluationResult(dict(zip(episodes, table, strict=True))).logs()
        return {name: value for name, value in logs.items() if not math.isnan(value)}

    def save_step_csvs(self, step_data_per_env: StepRows | None, split: str = "eval") -> list[Path]:
        """Write the step data of ``rollout`` to ``<log_dir>/<split>/eval<N>/env<M>/rewards.csv``.

        N counts the evaluations of the run, those of ``evaluate`` among them.

        Raises:
            ConfigError: when the runner has no ``log_dir``, or ``rollout`` recorded nothing.
        """
        if step_data_per_env is None:
            raise ConfigError("save_step_csvs got no step data: call rollout with record_step_data=True.")
        if self.run_dir is None:
            raise ConfigError("save_step_csvs needs a directory for the tables: give the runner a log_dir.")
        self.directories.prepare(self.iteration)
        directory = self.run_dir / split / f"eval{self.num_evaluations}"
        with files.writing(directory):
            paths = save_step_csvs(step_data_per_env, directory)
        self.counters.num_evaluations += 1
        return paths


def _running_episodes(env: VecEnv, policy: Policy, obs: Observation | Mapping[str, Tensor] | None) -> RunningEpisodes:
    """Return the episodes that a rollout continues: those that run in the environment, else new ones from ``obs``.

    Whatever observation a caller gives back, running episodes continue from where the environment stands.
    """
    if obs is None:
        obs = env.reset()
    running = env.running
    was_moved = running is not None and env.find_moved() is not None
    if running is not None and not was_moved and obs is running.handed_out:
        return continued(running, env, policy)
    obs = _observation(obs, env.num_envs)
    if running is None or was_moved or _may_have_reset(env):
        return new_episodes(env, policy, obs.to(env.device))
    return continued(running, env, policy)


def _observation(obs: Any, num_envs: int) -> Observation:
    """Return what a ``reset`` gave, with or without its info and in arrays or tensors, as an observation."""
    if isinstance(obs, tuple):
        obs = obs[0]
    found: Observation
    if isinstance(obs, TensorDict):
        found = obs
    elif isinstance(obs, Mapping):  # a simulator's own groups
        groups = {name: value if isinstance(value, Mapping) else torch.as_tensor(value) for name, value in obs.items()}
        found = TensorDict(groups)
    else:
        found = torch.as_tensor(obs)
    sizes = {len(value) if value.ndim else 0 for value in leaves(found).values()}
    if sizes != {num_envs}:
        raise ConfigError(
            f"rollout got observations of {sorted(sizes)} environments, but there are {num_envs}; give what reset() or "
            "the last rollout of these environments returned, or None to reset them."
        )
    if isinstance(found, TensorDict):
        found.batch_size = torch.Size([num_envs])
    return found


def _may_have_reset(env: VecEnv) -> bool:
    """Whether a wrapped simulator may have been reset by its own method, which the wrapper does not see."""
    simulator = getattr(env, "simulator", None)
    if simulator is None or not env.can_reset:
        return False
    lengths = getattr(simulator, "episode_length_buf", None)
    return lengths is None or not bool(torch.as_tensor(lengths).any())


def _actor_from(
    policy_fn: PolicyFunction,
    own_actor: Actor,
    device: torch.device,
    env_device: torch.device,
) -> Actor:
    def actor(carry: Carry) -> dict[str, Tensor]:
        returned = policy_fn(carry[OBSERVATION].to(device))
        action, log_prob, *_ = returned if isinstance(returned, tuple) else (returned, None)
        num_envs = len(carry[OBSERVATION])
        if not isinstance(action, Tensor) or not action.ndim or len(action) != num_envs:
            what = list(action.shape) if isinstance(action, Tensor) else type(action).__name__
            raise ConfigError(
                f"policy_fn must return (action, log_prob, value) with an action for each of {num_envs} environments, "
                f"or the action alone; its action is {what}."
            )
        chosen = {ACTION: action} if log_prob is None else {ACTION: action, SAMPLE_LOG_PROB: log_prob}
        chosen = {name: value.to(env_device) for name, value in chosen.items()}
        if len(carry) == 1:
            return chosen
        # A recurrent policy still watches: its memory is needed for the values.
        return {name: value for name, value in own_actor(carry).items() if name in carry} | chosen

    return actor
