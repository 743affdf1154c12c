"""A trainer made from actor and critic classes, or from a ready-made agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl import distributed
from apexrl.agent.trainer import Trainer, TrainingConfig
from apexrl.algorithms import ALGORITHMS, BaseAlgorithm
from apexrl.algorithms.base import find_device
from apexrl.collectors.sync import add_values
from apexrl.envs import VecEnv, as_vec_env
from apexrl.errors import ConfigError, did_you_mean
from apexrl.evaluation import StepRows, extend_rows
from apexrl.loggers import JsonlLogger, Logger, TensorBoardLogger, cut_json_lines
from apexrl.metrics import EpisodeMetrics, fold_episodes
from apexrl.models import MLPActor, MLPCritic
from apexrl.rollout import initial_state, make_actor, rollout
from apexrl.types import ACTION, OBSERVATION, SAMPLE_LOG_PROB, VALUE, Actor, Carry, Observation


class OnPolicyRunner(Trainer):
    """Trains an on-policy algorithm; the loop is the trainer's.

    Args:
        env: a ``VecEnv``, or an object that steps as ``(obs, reward, done, extras)``.
        algorithm: name of the algorithm to make; not used with ``agent``.
        actor_class: class of the actor network.
        critic_class: class of the critic network.
        actor_cfg: options of the actor, such as ``hidden_dims``.
        critic_cfg: options of the critic.
        log_dir: where ``metrics.jsonl``, ``evaluations.jsonl`` and TensorBoard events go; None logs nothing.
        save_dir: where checkpoints go; None saves none.
        device: of the policy; CUDA when there is one, when not given. With ``agent`` this and the options above, from
            ``algorithm`` to ``critic_cfg``, are refused: the agent has its own.
        log_interval: iterations between logged ones.
        save_interval: iterations between checkpoints; 0 saves only at the end.
        log_reward_components: log what the environment declares as components of its reward.
        agent: a ready-made algorithm.
        cfg: the algorithm's configuration.
        eval_env: environments for evaluation; made from ``env`` when not given.
        eval_interval: iterations between evaluations; 0 never evaluates by itself.
        seed: of the environments.
        loggers: more places for the numbers.
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
        seed: int = 0,
        loggers: tuple[Logger, ...] = (),
    ) -> None:
        vec_env = as_vec_env(env)
        if agent is None:
            # Those that train an actor and a critic given as classes.
            known = [
                name
                for name, (cls, _) in ALGORITHMS.items()
                if cls.on_policy and "mlp" in cls.policies and VALUE in cls.required_keys
            ]
            if algorithm not in known:
                raise ConfigError(
                    f"Unknown algorithm '{algorithm}'; known are {known}." + did_you_mean(algorithm, known)
                )
            make: Any = ALGORITHMS[algorithm][0]
            agent = make(
                vec_env,
                cfg,
                actor_class,
                critic_class,
                actor_cfg=actor_cfg,
                critic_cfg=critic_cfg,
                device=device or find_device(),
            )
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
        if log_dir is not None:
            log_dir = Path(log_dir)
        if log_dir is not None and distributed.is_first():
            log_dir.mkdir(parents=True, exist_ok=True)
            loggers = (JsonlLogger(log_dir / "metrics.jsonl"), TensorBoardLogger(log_dir), *loggers)
        super().__init__(
            vec_env,
            agent.policy,
            agent,
            TrainingConfig(seed=seed, save_interval=save_interval, eval_interval=eval_interval),
            eval_env=eval_env,
            loggers=loggers,
            run_dir=log_dir,
            save_dir=save_dir,
            log_interval=log_interval,
            log_reward_components=log_reward_components,
        )
        self.agent = agent
        self.eval_episode_metrics = EpisodeMetrics()
        self._rollout_envs: dict[int, VecEnv] = {}
        self._memories: dict[int, dict[str, Tensor]] = {}

    @property
    def episode_metrics(self) -> EpisodeMetrics:
        """Episodes of the training environments; evaluation has its own."""
        return self.collector.episode_metrics

    def eval(self, num_episodes: int = 10) -> dict[str, float]:
        """Evaluate deterministically on separate environments; returns numbers by log name."""
        return self.evaluate(num_episodes, deterministic=True).logs()

    def learn(self, total_timesteps: int | None = None) -> None:
        """Train as ``Trainer.learn`` does; lines of another run after the current iteration leave the logs."""
        if self.run_dir is not None and distributed.is_first():
            cut_json_lines(self.run_dir / "metrics.jsonl", self.iteration)
            cut_json_lines(self.run_dir / "evaluations.jsonl", self.iteration, max_lines=self.num_evaluations)
        super().learn(total_timesteps)

    def rollout(
        self,
        obs: Observation | None,
        num_steps: int,
        envs: Any = None,
        policy_fn: Callable[[Observation], tuple[Tensor | None, ...]] | None = None,
        collect_for_training: bool = True,
        record_step_data: bool = False,
    ) -> tuple[Observation, TensorDict | None, StepRows | None]:
        """Take steps in the training environments or in others, with the policy or any function.

        Args:
            obs: where to start; None resets the environments.
            num_steps: steps to take.
            envs: as ``env`` of the runner; the training environments when not given.
            policy_fn: returns ``(action, log_prob, value)`` or ``(action, log_prob, entropy, value)``, of which all but
                the action may be None; the sampling policy when not given.
            collect_for_training: return the batch that ``algorithm.update`` takes.
            record_step_data: return one row a step for each environment.

        Returns:
            The next observation, the batch ``[T, N]`` or None, and the rows by environment or None.
        """
        envs = self._vec_env(envs)
        carry: Carry = {OBSERVATION: envs.reset() if obs is None else obs}
        # The caller passes observations alone, so the memory of a recurrent policy is kept here between calls.
        known = self._memories.get(id(envs)) if obs is not None else None
        carry.update(known or initial_state(self.policy, envs))
        actor = make_actor(self.policy, envs.device)
        if policy_fn is not None:
            actor = _actor_from(policy_fn, actor)
        self.policy.eval()
        batch, carry = rollout(envs, actor, carry, num_steps, keep=None if collect_for_training else ())
        self._memories[id(envs)] = {name: value for name, value in carry.items() if name != OBSERVATION}
        fold_episodes(batch, envs.metric_specs, self.episode_metrics if envs is self.env else self.eval_episode_metrics)
        rows: StepRows | None = None
        if record_step_data:
            rows = {index: [] for index in range(envs.num_envs)}
            extend_rows(rows, batch)
        if collect_for_training:
            add_values(batch, self.policy)
        return carry[OBSERVATION], batch if collect_for_training else None, rows

    def _vec_env(self, envs: Any) -> VecEnv:
        """Return the same wrapper for the same environments, and keep it: memories are found by its id."""
        if envs is None or envs is getattr(self.env, "simulator", None):
            return self.env
        if id(envs) not in self._rollout_envs:
            self._rollout_envs[id(envs)] = as_vec_env(envs)
        return self._rollout_envs[id(envs)]


def _actor_from(policy_fn: Callable[[Observation], tuple[Tensor | None, ...]], own_actor: Actor) -> Actor:
    def actor(carry: Carry) -> dict[str, Tensor]:
        action, log_prob, *_ = policy_fn(carry[OBSERVATION])
        assert action is not None
        chosen = {ACTION: action} if log_prob is None else {ACTION: action, SAMPLE_LOG_PROB: log_prob}
        if len(carry) == 1:
            return chosen
        # A recurrent policy still watches: its memory is needed for the values.
        return {name: value for name, value in own_actor(carry).items() if name in carry} | chosen

    return actor
