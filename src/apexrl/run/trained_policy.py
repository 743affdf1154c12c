"""Trained policies: what a checkpoint needs to run."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch

from apexrl.agent.recipe import read_policy, read_recipe
from apexrl.algorithms.base import find_device
from apexrl.collectors.demonstrations.record import Plans
from apexrl.collectors.episodes import find_plans
from apexrl.core.errors import CheckpointError, ConfigError, UntrustedError
from apexrl.core.metrics import EpisodeMetrics
from apexrl.envs import VecEnv
from apexrl.envs.suites.base import TaskSuite
from apexrl.policies import Policy
from apexrl.run.build import load_content, prepare_device
from apexrl.run.config import Config, make_config


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
        return self.config.task.make_env(self.device, num_envs)

    def plans(self, suite: TaskSuite, per_task: int, *, start: int = 0, num_workers: int = 1) -> Plans:
        """Let the policy act from the training states of a suite, from number ``start`` on, for ``record_demos``.

        The plans have ``per_task`` successes of each task; the suite may record what the policy does not see.
        """
        task = self.config.task
        env = task.make_env_on(suite, self.device, num_workers)
        if env is None:
            raise ConfigError(f"{self.checkpoint} was trained on '{task.id}', which is no suite of tasks.")
        if (env.observation_space, env.action_space) != (self.policy.observation_space, self.policy.action_space):
            raise ConfigError(
                f"{self.checkpoint} was trained on '{task.id}' and cannot act on '{suite.name}', whose observations or "
                "actions are others."
            )
        states = [suite.init_states(task_id, "train")[start:] for task_id in range(suite.num_tasks)]
        with contextlib.closing(env):
            found = find_plans(env, self.policy, states, per_task)
        return [{start + number: plan for number, plan in plans.items()} for plans in found]


def load_trained(source: Path) -> TrainedPolicy:
    """Load the newest checkpoint of a run directory, or one checkpoint file."""
    source, content = load_content(source)
    sections = content["config"] or read_recipe(content, source).sections()
    try:
        config = make_config(sections)
    except UntrustedError:
        raise
    except ConfigError as error:
        raise CheckpointError(f"{source} cannot be used: its 'config' does not fit: {error}") from error
    try:
        device = prepare_device(config)
    except ConfigError:  # trained on a device that this machine does not have
        device = find_device()
    policy, _ = read_policy(content, source)
    episodes = EpisodeMetrics()
    if "episode_metrics" in content["collector"]:
        episodes.load_state_dict(content["collector"]["episode_metrics"], torch.device("cpu"))
    return TrainedPolicy(config, policy.to(device), device, source, frozenset(episodes.events()))
