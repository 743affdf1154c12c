"""Post-training a flow policy: from one demonstration, which says nothing of other goals, to all of them.

``python -m tests.learning.test_flow_learning`` compares noise in every denoising step with noise in the last.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from apexrl.algorithms import RLOO, RLOOConfig
from apexrl.policies.vla import VLAPolicy

pytestmark = pytest.mark.slow

CHUNK, NUM_ACTIONS, NUM_CHUNKS, SPEED, RADIUS = 5, 4, 6, 0.05, 0.12
GROUPS, GROUP_SIZE = 32, 8


def starts(count: int) -> tuple[Tensor, Tensor]:
    """Draw where points begin, and goals at a distance of 0.8 in many directions."""
    position, angle = torch.rand(count, 2) * 0.4 - 0.2, torch.rand(count) * 1.6 - 0.8
    return position, position + 0.8 * torch.stack((angle.cos(), angle.sin()), -1)


def observe(position: Tensor, goal: Tensor) -> TensorDict:
    return TensorDict({"state": torch.cat((position, goal), -1)}, [len(position)])


def demonstrate() -> TensorDict:
    """Return the chunks of a point that goes straight to one goal; two numbers of an action do nothing."""
    (position, goal), chunks = starts(1), []
    for _ in range(NUM_CHUNKS):
        obs, actions = observe(position, goal), []
        for _ in range(CHUNK):
            way = goal - position
            action = way / way.norm().clamp(min=SPEED)
            actions += [action, torch.zeros(1, NUM_ACTIONS - 2)]
            position = position + SPEED * action
        chunks.append(TensorDict({"observation": obs, "action": torch.cat(actions, -1)}, [1]))
    demonstration: TensorDict = TensorDict.cat(chunks)
    return demonstration


@torch.no_grad()
def play(policy: VLAPolicy, position: Tensor, goal: Tensor, *, deterministic: bool) -> tuple[TensorDict, Tensor]:
    """Return a batch ``[T, E]``, and which episodes came to their goal."""
    done, steps = torch.zeros(len(position), dtype=torch.bool), []
    for _ in range(NUM_CHUNKS):
        obs, valid, reward = observe(position, goal), ~done, torch.zeros(len(position))
        output = policy.act({"observation": obs}, deterministic)
        for action in output["action"].unflatten(-1, (CHUNK, NUM_ACTIONS)).unbind(1):
            position = torch.where(done.unsqueeze(-1), position, position + SPEED * action[:, :2].clamp(-1, 1))
            arrived = ((position - goal).norm(dim=-1) < RADIUS) & ~done
            reward, done = reward + arrived, done | arrived
        columns = {"reward": reward.unsqueeze(-1), "valid": valid.unsqueeze(-1)}
        steps.append(TensorDict({"observation": obs, **output, **columns}, [len(position)]))
    return TensorDict.stack(steps), done


def learn(seed: int, iterations: int, **options: Any) -> tuple[float, float]:
    """Imitate one demonstration, then post-train; returns the success of both over 400 goals, without noise."""
    torch.manual_seed(seed)
    states, actions = gym.spaces.Box(-2, 2, (4,), np.float32), gym.spaces.Box(-1, 1, (CHUNK * NUM_ACTIONS,), np.float32)
    sizes: dict[str, Any] = {"width": 64, "depth": 2, "num_heads": 4, "expert_width": 64}
    policy = VLAPolicy(gym.spaces.Dict({"state": states}), actions, chunk=CHUNK, head="flow", **sizes, **options)
    demonstration = demonstrate()
    state, action = demonstration["observation", "state"], demonstration["action"].reshape(-1, NUM_ACTIONS)
    policy.set_statistics(state.mean(0), state.std(0), action.mean(0), action.std(0), min_std=0.3)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
    for _ in range(400):
        optimizer.zero_grad()
        policy.imitation_loss(demonstration[torch.randint(len(demonstration), (64,))]).mean().backward()
        optimizer.step()
    policy.eval()
    cfg = RLOOConfig(num_groups=GROUPS, num_epochs=4, learning_rate=5e-4, clip_coef=0.4, warmup_steps=20)
    algorithm, held_out = RLOO(policy=policy, cfg=cfg), starts(400)
    before = play(policy, *held_out, deterministic=True)[1]
    for _ in range(iterations):
        each = [part.repeat_interleave(GROUP_SIZE, 0) for part in starts(GROUPS)]
        batch, _ = play(policy, *each, deterministic=False)
        batch["group"] = torch.arange(GROUPS).repeat_interleave(GROUP_SIZE).expand(NUM_CHUNKS, -1).unsqueeze(-1)
        algorithm.update(batch)
    after = play(policy, *held_out, deterministic=True)[1]
    return before.float().mean().item(), after.float().mean().item()


@pytest.mark.learning
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_flow_policy_learns_other_goals_than_the_demonstrated_one(seed: int) -> None:
    before, after = learn(seed, 25, noise="last_step", noise_level=0.7)
    assert before < 0.3
    assert after >= 0.8


if __name__ == "__main__":
    for options in (
        {"noise": "every_step", "noise_level": 2.5},
        {"noise": "every_step", "noise_level": 1.4, "denoising_steps": 2},
        {"noise": "last_step", "noise_level": 0.7},
    ):
        print(options, *(f"{100 * rate:.0f} %" for rate in learn(0, 40, **options)), flush=True)
