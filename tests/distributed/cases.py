"""What two processes and one must compute alike: each case runs on its share of the data, or on all of it.

The minibatches of several processes are the unions of theirs, so one process gets just this order here.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from apexrl import (
    PPO,
    PPOROA,
    RLOO,
    SAC,
    ActorCritic,
    PPOConfig,
    PPOROAConfig,
    RLOOConfig,
    ROAPolicy,
    SACConfig,
    SACPolicy,
    SyncCollector,
    Trainer,
    VecEnv,
    make_env,
)
from apexrl.agent import TrainingConfig, checkpoint
from apexrl.agent.trainer import env_seed
from apexrl.agent.training_log import merged_collection, merged_to_host
from apexrl.core.errors import DivergenceError
from apexrl.core.metrics import MetricSpec
from apexrl.core.system import distributed
from apexrl.core.types import EnvStep
from apexrl.policies import Policy
from apexrl.policies.networks.distributions import DiagGaussian

NUM_PARTS = 2
"""Processes among which a case is split."""
NUM_ENVS, NUM_STEPS, NUM_UPDATES = 12, 8, 10
OWN_ENVS = NUM_ENVS // NUM_PARTS


def own_slice(size: int = OWN_ENVS) -> slice:
    """The environments of this process; all of them in a single one."""
    if distributed.world_size() == 1:
        return slice(None)
    return slice(distributed.rank() * size, (distributed.rank() + 1) * size)


class _Orders:
    """Takes the place of ``torch.randperm``: the same minibatches, whether two processes learn or one."""

    def __init__(self, num_minibatches: int) -> None:
        self.num_minibatches, self.calls = num_minibatches, 0

    def __call__(self, count: int, **_: Any) -> Tensor:
        self.calls += 1
        own = count // NUM_PARTS if distributed.world_size() == 1 else count
        parts = []
        for part in range(NUM_PARTS):
            generator = torch.Generator().manual_seed(1000 * self.calls + part)
            parts.append(torch.rand(own, generator=generator).argsort())
        if distributed.world_size() > 1:
            return parts[distributed.rank()]
        # A sample of a part is number step · own environments + environment there.
        step, env = (torch.stack(parts) // OWN_ENVS, torch.stack(parts) % OWN_ENVS)
        whole = step * NUM_ENVS + env + OWN_ENVS * torch.arange(NUM_PARTS)[:, None]
        return torch.cat([part.reshape(-1) for part in whole.tensor_split(self.num_minibatches, dim=1)])


def _sample_together(self: DiagGaussian) -> Tensor:
    """Draw the noise of all rows, and use one's own."""
    own, *sizes = self.mean.shape
    noise = torch.randn(own * distributed.world_size(), *sizes)
    return self.mean + self.std * noise[own_slice(own)]


@contextmanager
def alike(num_minibatches: int) -> Iterator[None]:
    """Draw the same random numbers, whether two processes learn or one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randperm", _Orders(num_minibatches))
        patch.setattr(DiagGaussian, "sample", _sample_together)
        torch.manual_seed(5)
        yield


class Slice(VecEnv):
    """This process's environments of a task whose random numbers are drawn for all environments together."""

    def __init__(self, name: str) -> None:
        self.all = make_env(name, NUM_ENVS, max_episode_steps=11)
        self.own = own_slice()
        self.num_envs, self.device = len(range(NUM_ENVS)[self.own]), self.all.device
        self.observation_space, self.action_space = self.all.observation_space, self.all.action_space
        self.max_episode_steps = self.all.max_episode_steps

    @property
    def metric_specs(self) -> Mapping[str, MetricSpec]:
        return self.all.metric_specs

    def reset(self, seed: int | None = None) -> Any:
        return self.all.reset(None if seed is None else 0)[self.own]  # the same for every process

    def step(self, action: Tensor) -> EnvStep:
        actions = torch.zeros(NUM_ENVS, *action.shape[1:])
        actions[self.own] = action
        obs, reward, terminated, truncated, final_obs, metric, *_ = self.all.step(actions)
        assert final_obs is not None
        own = self.own
        named = {name: value[own] for name, value in metric.items()}
        return EnvStep(obs[own], reward[own], terminated[own], truncated[own], final_obs[own], named)


def _make_ppo(**options: Any) -> PPO:
    torch.manual_seed(0)
    policy = ActorCritic.for_env(make_env("lift", 1), actor_cfg={"hidden_dims": [16]}, normalize_obs=True)
    return PPO(policy=policy, cfg=PPOConfig(num_steps=NUM_STEPS, learning_rate=3e-3, **options))


def weights(algorithm: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in algorithm.policy.state_dict().items()}


@torch.no_grad()
def _random_batch(policy: Policy, seed: int) -> TensorDict:
    """A rollout of made-up numbers, of which every process takes its environments."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(NUM_STEPS, NUM_ENVS, *sizes, generator=generator)

    obs, action = 2.0 * normal(13) + seed, normal(3)
    ended = normal(1) > 1.2
    batch = TensorDict(
        {
            "observation": obs,
            "action": action,
            "reward": normal(1) + 1.0,
            "terminated": ended,
            "truncated": torch.zeros_like(ended),
            "done": ended,
            "value": policy.get_value(obs),
            "next_value": normal(1),
            "sample_log_prob": policy.evaluate_actions(obs, action)[0] + 0.05 * normal(1),
        },
        batch_size=[NUM_STEPS, NUM_ENVS],
    )
    own: TensorDict = batch[:, own_slice()].contiguous()
    return own


def ppo_updates(**options: Any) -> dict[str, Tensor]:
    """Ten updates on made-up rollouts."""
    algorithm = _make_ppo(**options)
    with alike(algorithm.cfg.num_minibatches):
        for seed in range(NUM_UPDATES):
            metrics = algorithm.update(_random_batch(algorithm.policy, seed))
    result = {**weights(algorithm), **{f"metric.{name}": value for name, value in metrics.items()}}
    if algorithm.reward_scaler is not None:
        result["reward_variance"] = algorithm.reward_scaler.statistics.var
    return result


def lift_training() -> dict[str, Tensor]:
    """Ten iterations of training on ``lift``: environments, exploration, normalisers, logs."""
    env = Slice("lift")
    algorithm = _make_ppo(num_minibatches=2, num_epochs=2, normalize_reward=True, schedule="adaptive")
    steps = NUM_ENVS * NUM_STEPS * (NUM_UPDATES + 1)  # with the rollout that the normaliser sees first
    trainer = Trainer(env, algorithm.policy, algorithm, TrainingConfig(total_timesteps=steps, seed=3))
    lines: list[dict[str, float]] = []
    trainer.add_callback("post_iteration", lambda _, stats: lines.append(stats))
    with alike(2):
        trainer.learn()
    assert trainer.iteration == NUM_UPDATES
    logged = {
        f"log.{number}.{name}": torch.tensor(value)
        for number, line in enumerate(lines)
        for name, value in line.items()
        if not name.startswith("time/")
    }
    return {**weights(algorithm), **logged}


def roa_updates(phase: Literal["train", "finetune"]) -> dict[str, Tensor]:
    """Three updates of PPO-ROA; the windows of a process do not all teach the adaptation module."""
    torch.manual_seed(0)
    policy = ROAPolicy.for_env(
        make_env("payload", 1), hidden_dims=(8,), encoder_dims=(8,), adapt_dims=(8,), normalize_obs=True
    )
    cfg = PPOROAConfig(
        num_steps=NUM_STEPS, num_epochs=2, num_minibatches=2, adapt_minibatches=2, min_frames=3, phase=phase
    )
    algorithm = PPOROA(policy, cfg)
    env = make_env("payload", NUM_ENVS, max_episode_steps=6)
    collector = SyncCollector(env, algorithm.rollout_policy, keep=PPOROA.required_keys, seed=0)
    torch.manual_seed(1)
    rollouts = [collector.collect(NUM_STEPS) for _ in range(3)]  # before any update: the same in every process
    with alike(2):
        for rollout in rollouts:
            metrics = algorithm.update(rollout[:, own_slice()].contiguous())
    host = merged_to_host({f"metric.{name}": value for name, value in metrics.items()}, {})
    return {**weights(algorithm), **{name: torch.tensor(value) for name, value in host.items()}}


def sac_updates() -> dict[str, Tensor]:
    """Gradient steps of SAC, with what the replay buffers draw given."""
    own = 32 // distributed.world_size()
    torch.manual_seed(0)
    env = Slice("lift")
    policy = SACPolicy.for_env(env, actor_cfg={"hidden_dims": [16]}, critic_cfg={"hidden_dims": [16]})
    cfg = SACConfig(num_steps=NUM_STEPS, batch_size=own, learning_starts=0, utd_ratio=0.1, max_grad_norm=1.0)
    algorithm = SAC(policy=policy, cfg=cfg)
    generator = torch.Generator().manual_seed(2)

    def sample(*_: Any, **__: Any) -> dict[str, Any]:
        sizes = {"observation": 13, "action": 3, "reward": 1, "discount": 1, "next_observation": 13, "weight": 1}
        drawn = {name: torch.rand(32, size, generator=generator)[own_slice(own)] for name, size in sizes.items()}
        return {**drawn, "index": torch.arange(own)}

    collector = SyncCollector(env, algorithm.rollout_policy, keep=SAC.required_keys, seed=env_seed(0))
    with alike(1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(algorithm.replay, "sample", sample)
        for _ in range(2):
            metrics = algorithm.update(collector.collect(NUM_STEPS))
    assert algorithm.state_dict()["num_updates"] == int(0.1 * 2 * NUM_STEPS * NUM_ENVS)
    host = merged_to_host({f"metric.{name}": value for name, value in metrics.items()}, {})
    return {
        **weights(algorithm),
        "log_temperature": algorithm.log_temperature.detach().clone(),
        **{name: torch.tensor(value) for name, value in host.items()},
    }


def rloo_updates(**options: Any) -> dict[str, Tensor]:
    """Three updates of RLOO on groups whose episodes differ in length, so that processes differ in samples."""
    torch.manual_seed(0)
    num_groups, size, length = 6, 4, 3
    count = num_groups * size
    policy = ActorCritic(gym.spaces.Box(-1, 1, (2,)), gym.spaces.Box(-1, 1, (3,)))
    algorithm = RLOO(policy=policy, cfg=RLOOConfig(num_epochs=3, num_minibatches=1, learning_rate=1e-2, **options))
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        obs, action = (torch.randn(length, count, width, generator=generator) for width in (2, 3))
        lengths = torch.randint(1, length + 1, (count,), generator=generator)
        valid = (torch.arange(length)[:, None] < lengths).unsqueeze(-1)
        ends = (torch.arange(length)[:, None] == lengths - 1).unsqueeze(-1)
        won = torch.rand(1, count, 1, generator=generator) < torch.linspace(0.2, 0.8, count).view(1, count, 1)
        with torch.no_grad():
            log_prob = policy.evaluate_actions(obs, action)[0]
        batch = TensorDict(
            {
                "observation": obs,
                "action": action,
                "sample_log_prob": log_prob,
                "reward": (ends & won).float(),
                "valid": valid,
                "group": torch.arange(num_groups).repeat_interleave(size).expand(length, -1).unsqueeze(-1).clone(),
            },
            batch_size=[length, count],
        )
        metrics = algorithm.update(batch[:, own_slice(count // 2)].contiguous())
    return {**weights(algorithm), **{f"metric.{name}": value for name, value in metrics.items()}}


def divergence() -> dict[str, Tensor]:
    """A reward that is not finite in the last process stops all of them, before any weight has changed."""
    algorithm = _make_ppo(num_minibatches=2)
    before = weights(algorithm)
    batch = _random_batch(algorithm.policy, 0)
    if distributed.rank() == distributed.world_size() - 1:
        batch["reward"][3, 1] = torch.nan
    metrics = algorithm.update(batch)
    message = ""
    try:
        if metrics["nonfinite"] > 0:
            algorithm.raise_diverged(batch)
    except DivergenceError as error:
        message = str(error)
    assert "'reward' of the rollout is not finite at 1 of" in message, message
    after = weights(algorithm)
    return {"unchanged": torch.tensor(all(torch.equal(after[name], value) for name, value in before.items()))}


def own_noise() -> dict[str, Tensor]:
    """Say whether processes that are seeded alike explore apart, in a trainer that no command has made."""
    algorithm = _make_ppo()
    trainer = Trainer(make_env("lift", 4), algorithm.policy, algorithm)
    # It follows from the noise and the standard deviation, which is the same everywhere.
    drawn = distributed.all_gather_object(trainer.collector.collect(2)["sample_log_prob"])
    return {"apart": torch.tensor(not any(torch.allclose(a, b) for a, b in itertools.combinations(drawn, 2)))}


def beginning() -> dict[str, Tensor]:
    """Return what RLOO begins with where processes draw weights of their own."""
    torch.manual_seed(distributed.rank())
    env = make_env("lift", 2)
    policy = ActorCritic.for_env(env, actor_cfg={"hidden_dims": [4]})
    algorithm = RLOO(policy=policy, cfg=RLOOConfig(kl_coef=0.1))
    Trainer(env, policy, algorithm, collector=SyncCollector(env, policy))
    assert algorithm.reference is not None
    reference = {f"reference.{name}": value for name, value in algorithm.reference.state_dict().items()}
    return {**weights(algorithm), **reference}


def collection() -> dict[str, Tensor]:
    """Merge numbers about the collecting: a count, a mean, and one that is not known to all."""
    rank, count = distributed.rank(), distributed.world_size()
    numbers = {"collect/groups": 8.0 / count, "collect/staleness": 1.0 + (rank - (count - 1) / 2) / 2}
    if distributed.is_main_process():
        numbers["collect/overlap"] = 0.5
    return {name: torch.tensor(value) for name, value in merged_collection(numbers).items()}


def saves_by_the_clock() -> dict[str, Tensor]:
    """Save iterations that end six minutes apart by the clock of the first process, whatever the other says."""
    algorithm = _make_ppo(num_minibatches=1)
    cfg = TrainingConfig(save_interval=50, save_minutes=10, keep_checkpoints=0)
    save_dir = Path(distributed.on_main_process(tempfile.mkdtemp))
    trainer = Trainer(Slice("lift"), algorithm.policy, algorithm, cfg, save_dir=save_dir)
    trainer.checkpointer.last_time = 0.0
    trainer.checkpointer.clock = lambda: 360.0 * trainer.iteration * distributed.is_main_process()
    with alike(1):
        trainer.learn(NUM_ENVS * NUM_STEPS * 6)
    saved = [checkpoint.load(path)["iteration"] for path in checkpoint.numbered(save_dir)]
    distributed.all_gather_object(None)  # both have read them
    distributed.on_main_process(lambda: shutil.rmtree(save_dir))
    assert saved == [2, 4, 5], saved
    return {"saved": torch.tensor(saved)}


CASES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "one minibatch": lambda: ppo_updates(num_minibatches=1),
    "minibatches": lambda: ppo_updates(num_minibatches=3, num_epochs=3, normalize_reward=True),
    "advantage of minibatches": lambda: ppo_updates(num_minibatches=2, normalize_advantage="minibatch"),
    "adaptive rate": lambda: ppo_updates(num_minibatches=3, schedule="adaptive", desired_kl=0.02),
    "early stop": lambda: ppo_updates(num_minibatches=3, num_epochs=6, target_kl=0.01),
    "lift": lift_training,
    "teacher": lambda: roa_updates("train"),
    "student": lambda: roa_updates("finetune"),
    "sac": sac_updates,
    "rloo by group": lambda: rloo_updates(normalize_advantage="group"),
    "rloo by batch": lambda: rloo_updates(baseline="batch", normalize_advantage="batch", target_kl=0.01),
    "divergence": divergence,
    "own noise": own_noise,
    "beginning": beginning,
    "collection": collection,
    "clock": saves_by_the_clock,
}
