from __future__ import annotations

import math
from collections.abc import Callable

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tests.refusals import refused
from torch import Tensor, distributions

from apexrl.core.errors import ConfigError
from apexrl.core.functional.episodes import stack_episodes
from apexrl.policies.vla import PI0_CFG_Adapter, VLAPolicy, instruction_tensor
from apexrl.policies.vla.flow import CONDITIONAL, UNCONDITIONAL, sde_step
from apexrl.policies.vla.likelihood import DiagLaplace, LikelihoodHead

SPACE = gym.spaces.Dict(
    {"state": gym.spaces.Box(-1, 1, (4,), np.float32), "instruction": gym.spaces.Box(0, 255, (96,), np.uint8)}
)
ACTIONS = gym.spaces.Box(-1, 1, (6,), np.float32)


def observe(count: int) -> TensorDict:
    text = instruction_tensor("open the drawer").expand(count, 96)
    return TensorDict({"state": torch.randn(count, 4), "instruction": text}, batch_size=[count])


def flow_policy(**options: float | str) -> VLAPolicy:
    policy = VLAPolicy(SPACE, ACTIONS, chunk=3, head="flow", **options)  # type: ignore[arg-type]
    torch.nn.init.normal_(policy.expert.head.weight, std=0.3)
    return policy


# Likelihood


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_densities_agree_with_torch(kind: str) -> None:
    policy = VLAPolicy(SPACE, ACTIONS, chunk=3, distribution=kind, init_std=0.4)
    assert policy.likelihood is not None
    policy.likelihood.log_std.data = torch.tensor([0.2, 0.5]).log()
    obs = observe(5)
    mean = policy(obs, deterministic=True).action
    std = torch.tensor([0.2, 0.5, 0.2, 0.5, 0.2, 0.5])
    peer: distributions.Distribution = distributions.Normal(mean, std)
    if kind == "laplace":
        peer = distributions.Laplace(mean, std / math.sqrt(2.0))
    action = mean + 0.3 * torch.randn_like(mean)
    log_prob, entropy = policy.evaluate_actions(obs, action)
    torch.testing.assert_close(log_prob, peer.log_prob(action).sum(-1, keepdim=True))
    torch.testing.assert_close(entropy, peer.entropy().sum(-1, keepdim=True))
    torch.testing.assert_close(
        policy.imitation_loss({"observation": obs, "action": action}), -peer.log_prob(action).sum(-1)
    )


def test_laplace_samples_have_the_standard_deviation_that_was_asked_for() -> None:
    torch.manual_seed(0)
    sample = DiagLaplace(torch.full((200_000, 1), 3.0), torch.tensor([0.7]).log()).sample()
    assert abs(sample.mean() - 3.0) < 0.01
    assert abs(sample.std() - 0.7) < 0.01
    # A normal distribution would have 3.
    kurtosis = ((sample - 3.0) / 0.7).pow(4).mean()
    assert 5.5 < kurtosis < 6.5


@pytest.mark.parametrize(("raw", "expected"), [(-50.0, 0.01), (50.0, 2.0)])
@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_the_scale_is_bounded_and_can_come_back(raw: float, expected: float, kind: str) -> None:
    head = LikelihoodHead(3, 2, distribution=kind)  # type: ignore[arg-type]
    head.log_std.data.fill_(raw)
    samples = torch.stack([head(torch.zeros(100, 6)).sample() for _ in range(100)])
    assert 0.9 * expected < samples.std() < 1.1 * expected
    for sign, inwards in ((1.0, raw > 0), (-1.0, raw < 0)):
        (gradient,) = torch.autograd.grad(sign * head(torch.zeros(4, 6)).entropy().sum(), head.log_std)
        assert torch.equal(gradient != 0, torch.full((2,), inwards)), "descent only ever leads back inside"


@pytest.mark.parametrize("head", ["likelihood", "flow"])
def test_padded_actions_of_a_demonstration_do_not_count(head: str) -> None:
    policy = VLAPolicy(SPACE, ACTIONS, chunk=3, head=head)  # type: ignore[arg-type]
    obs, action = observe(4), torch.randn(4, 6)
    other = action.clone()
    other[:, 2:] += 5.0
    steps = torch.ones(4, 1, dtype=torch.int64)
    losses = []
    for demonstrated in (action, other):
        torch.manual_seed(0)
        demonstrated = demonstrated.clone().requires_grad_()
        loss = policy.imitation_loss({"observation": obs, "action": demonstrated, "valid_steps": steps})
        (gradient,) = torch.autograd.grad(loss.sum(), demonstrated)
        if head == "likelihood":  # a flow's field may look at padding; its target there does not count
            assert (gradient[:, 2:] == 0).all()
        assert (gradient[:, :2] != 0).any()
        losses.append(loss)
    if head == "likelihood":
        torch.testing.assert_close(losses[0], losses[1])


# Flow


def test_one_step_of_the_sampler_is_a_density() -> None:
    # ∫ p(x') dx' = 1 over a fine grid, and its mean and variance are what the equation says.
    x, velocity, time, length, noise = torch.tensor([0.3]), torch.tensor([-1.2]), torch.tensor([0.4]), 0.2, 0.7
    grid = torch.linspace(-6, 6, 20_001, dtype=torch.float64).unsqueeze(-1)
    density = sde_step(x.double(), velocity.double(), time.double(), length, noise).log_prob(grid).exp().squeeze(-1)
    points = grid.squeeze(-1)
    mean = torch.trapezoid(points * density, points)
    assert torch.trapezoid(density, points).item() == pytest.approx(1.0, abs=1e-6)
    # 0.3 + 0.2 (-1.2 - 0.245 (0.3 + 0.48)) = 0.02178; 0.49 · 0.6 · 0.2 = 0.0588
    assert mean.item() == pytest.approx(0.02178, abs=1e-5)
    assert torch.trapezoid((points - mean).square() * density, points).item() == pytest.approx(0.0588, abs=1e-5)


@pytest.mark.parametrize("noise_level", [0.3, 1.0])
def test_noise_in_the_steps_keeps_the_marginals(noise_level: float) -> None:
    # Chunks ~ N(2, 0.5²): then x_t ~ N(2 t, (1 - t)² + (0.5 t)²) and the field is known.
    torch.manual_seed(0)
    steps, mean, std = 200, 2.0, 0.5
    x = torch.randn(20_000, 1)
    for k in range(steps):
        time = torch.tensor([k / steps])
        variance = (1 - time) ** 2 + (std * time) ** 2
        velocity = mean + (std**2 * time - (1 - time)) / variance * (x - mean * time)
        x = sde_step(x, velocity, time, 1.0 / steps, noise_level).sample()
    assert x.mean().item() == pytest.approx(mean, abs=0.02)
    assert x.std().item() == pytest.approx(std, abs=0.02)


@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_the_log_probability_of_a_path_by_hand(guidance: float) -> None:
    policy = flow_policy(denoising_steps=4, noise_level=0.6, guidance=guidance)
    assert policy.flow is not None
    obs = observe(5)
    with torch.no_grad():
        output = policy.act({"observation": obs})
        path = output["denoising"]
        assert path.shape == (5, 5, 6)
        assert torch.equal(output["action"], path[:, -1])
        expected = torch.zeros(5)
        prefix = policy.read(obs)
        for k in range(4):
            t, x = k / 4, path[:, k : k + 1]
            fields = [
                policy.flow.branch(policy.expert, prefix, x, torch.tensor([t]), branch)
                for branch in (UNCONDITIONAL, CONDITIONAL)
            ]
            v = fields[0] + guidance * (fields[1] - fields[0])
            score = -(x - t * v) / (1 - t)
            g2 = 0.36 * (1 - t)
            step = distributions.Normal(x + (v + 0.5 * g2 * score) / 4, math.sqrt(g2 / 4))
            expected += step.log_prob(path[:, k + 1 : k + 2]).sum((1, 2))
        entropy = sum(6 * distributions.Normal(0.0, math.sqrt(0.36 * (1 - k / 4) / 4)).entropy() for k in range(4))
    torch.testing.assert_close(output["sample_log_prob"].squeeze(-1), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(policy.evaluate({"observation": obs, **output}).entropy, entropy.expand(5, 1))


def test_actions_that_were_never_executed_leave_the_last_step_of_a_path() -> None:
    torch.manual_seed(0)
    policy = flow_policy(denoising_steps=4, noise_level=0.6)
    assert policy.flow is not None
    obs = observe(5)
    with torch.no_grad():
        output = policy.act({"observation": obs})
        path, time = output["denoising"], torch.tensor([0.75])
        velocity = policy.flow.branch(policy.expert, policy.read(obs), path[:, 3:4], time, CONDITIONAL)
        last = sde_step(path[:, 3:4], velocity, time, 0.25, 0.6).elements(path[:, 4:])[:, 0]
        # In earlier steps they moved the others, so there they count: one of three actions is executed.
        expected = output["sample_log_prob"] - last[:, 2:].sum(-1, keepdim=True)
        steps = torch.ones(5, 1, dtype=torch.int64)
        found = policy.evaluate({"observation": obs, **output, "valid_steps": steps}).log_prob
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def ordinary(policy: VLAPolicy, obs: TensorDict, noise: Tensor, steps: int) -> Tensor:
    """Follow the ordinary equation from noise ``[B, D]``."""
    assert policy.flow is not None
    x, prefix = noise.unsqueeze(1), policy.read(obs)
    for k in range(steps):
        x = x + policy.flow.branch(policy.expert, prefix, x, torch.tensor([k / steps]), CONDITIONAL) / steps
    return x.squeeze(1)


def test_noise_in_the_last_step_is_a_gaussian_around_the_end_of_the_ordinary_equation() -> None:
    torch.manual_seed(0)
    policy = flow_policy(denoising_steps=4, noise="last_step", noise_level=0.6)
    obs = observe(4000)
    with torch.no_grad():
        output = policy.act({"observation": obs})
        path = output["denoising"]
        assert path.shape == (4000, 2, 6)  # the first noise, and the chunk
        assert torch.equal(output["action"], path[:, -1])
        assert path[:, 0].std().item() == pytest.approx(1.0, abs=0.02)
        noise = (path[:, 1] - ordinary(policy, obs, path[:, 0], 4)) / 0.6
        evaluation = policy.evaluate({"observation": obs, **output})
    assert noise.mean().item() == pytest.approx(0.0, abs=0.02)
    assert noise.std().item() == pytest.approx(1.0, abs=0.02)
    expected = distributions.Normal(0.0, 0.6).log_prob(0.6 * noise).sum(-1, keepdim=True)
    torch.testing.assert_close(output["sample_log_prob"], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(evaluation.log_prob, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(evaluation.entropy, (6 * distributions.Normal(0.0, 0.6).entropy()).expand(4000, 1))


def test_noise_in_the_last_step_sees_all_of_the_divergence_that_a_change_causes() -> None:
    # A constant field that moves by 0.2 moves the end of every path by 0.2, whatever the number of steps: the
    # divergence is 6 · 0.2² / (2 · 0.5²) = 0.48, and the gradient of each number's field −z / 0.5, z standard normal.
    torch.manual_seed(0)
    policy = flow_policy(denoising_steps=5, noise="last_step", noise_level=0.5)
    torch.nn.init.zeros_(policy.expert.head.weight)
    obs = observe(4000)
    with torch.no_grad():
        output = policy.act({"observation": obs})
        policy.expert.head.bias.add_(0.2)
    log_prob = policy.evaluate({"observation": obs, **output}).log_prob
    assert (output["sample_log_prob"] - log_prob).mean().item() == pytest.approx(0.48, abs=0.05)
    (gradient,) = torch.autograd.grad(-log_prob.mean(), policy.expert.head.bias)
    # Σ over the three actions of a chunk of 0.2 / 0.5².
    torch.testing.assert_close(gradient, torch.full_like(gradient, 2.4), rtol=0.1, atol=0.0)


def test_the_gradient_of_a_chunk_passes_through_every_step() -> None:
    torch.manual_seed(0)
    policy = flow_policy(denoising_steps=3, noise="last_step", noise_level=0.5)
    obs = observe(8)
    with torch.no_grad():
        output = policy.act({"observation": obs})
    path, parameters = output["denoising"], list(policy.parameters())
    end = ordinary(policy, obs, path[:, 0], 3)
    expected = distributions.Normal(end, 0.5).log_prob(path[:, 1]).sum()
    found = policy.evaluate({"observation": obs, **output}).log_prob.sum()
    for one, other in zip(
        *(torch.autograd.grad(value, parameters, allow_unused=True) for value in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_guidance_one_is_the_conditional_field_exactly_and_zero_the_unconditional() -> None:
    policy = flow_policy()
    flow = policy.flow
    assert flow is not None
    prefix, x, time = policy.read(observe(4)), torch.randn(4, 5, 6), flow.times
    conditional, unconditional = (
        flow.branch(policy.expert, prefix, x, time, branch) for branch in (CONDITIONAL, UNCONDITIONAL)
    )
    assert not torch.allclose(conditional, unconditional)
    flow.guidance = 1.0
    assert torch.equal(flow.field(policy.expert, prefix, x, time), conditional)
    flow.guidance = 0.0
    assert torch.equal(flow.field(policy.expert, prefix, x, time), unconditional)
    flow.guidance = 3.0
    expected = 3.0 * conditional - 2.0 * unconditional
    torch.testing.assert_close(flow.field(policy.expert, prefix, x, time), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("noise", ["every_step", "last_step"])
def test_a_deterministic_path_follows_the_ordinary_equation_from_drawn_noise(noise: str) -> None:
    policy = flow_policy(denoising_steps=3, noise=noise)
    obs = observe(2000)
    with torch.no_grad():
        path = policy.act({"observation": obs}, deterministic=True)["denoising"]
        assert path[:, 0].mean().item() == pytest.approx(0.0, abs=0.05)
        assert path[:, 0].std().item() == pytest.approx(1.0, abs=0.05)
        torch.testing.assert_close(path[:, -1], ordinary(policy, obs, path[:, 0], 3), rtol=1e-4, atol=1e-4)


# Classifier-free guidance from advantages


def weighted(policy: VLAPolicy, batch: dict[str, object], advantages: Tensor, weight: float = 0.1) -> Tensor:
    torch.manual_seed(0)  # the same noise and times
    return PI0_CFG_Adapter(policy, weight).compute_weighted_loss(batch, advantages)


def test_positive_samples_train_the_conditional_branch_and_all_the_unconditional() -> None:
    policy = flow_policy()
    batch: dict[str, object] = {"observation": observe(4), "action": torch.randn(4, 6)}
    torch.manual_seed(0)
    positive = PI0_CFG_Adapter(policy, 0.0).sample_losses(batch, torch.ones(4))
    torch.manual_seed(0)
    everyone = PI0_CFG_Adapter(policy, 0.1).sample_losses(batch, -torch.ones(4, 1))
    expected = positive[[0, 2]].sum() / 4 + everyone.mean()
    torch.testing.assert_close(weighted(policy, batch, torch.tensor([1.0, -1.0, 0.2, 0.0])), expected)
    weighted(policy, batch, -torch.ones(4)).backward()
    assert policy.flow is not None
    gradient = policy.flow.condition.weight.grad
    assert gradient is not None
    assert (gradient[CONDITIONAL] == 0).all()
    assert (gradient[UNCONDITIONAL] != 0).any()


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_the_weighted_loss_is_bounded_below_for_negative_advantages(scale: float) -> None:
    policy = flow_policy()
    batch: dict[str, object] = {"observation": observe(16), "action": torch.randn(16, 6)}
    advantages = -scale * torch.rand(16)
    assert torch.equal(weighted(policy, batch, advantages), weighted(policy, batch, -torch.ones(16)))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    history = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = PI0_CFG_Adapter(policy).compute_weighted_loss(batch, advantages)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert min(history) > 0.0
    assert sum(history[-5:]) < sum(history[:5]), "the field does not run away from what went wrong"


def test_padded_samples_do_not_count() -> None:
    policy = flow_policy()
    batch: dict[str, object] = {"observation": observe(4), "action": torch.randn(4, 6)}
    valid = torch.tensor([[True], [True], [False], [True]])
    torch.manual_seed(0)
    losses = PI0_CFG_Adapter(policy).sample_losses(batch, torch.ones(4))
    torch.testing.assert_close(weighted(policy, {**batch, "valid": valid}, torch.ones(4)), losses[[0, 1, 3]].mean())


def test_one_advantage_per_episode_is_that_of_all_its_chunks() -> None:
    policy, lengths = flow_policy(), (3, 1)
    episodes = [
        {
            "group": 0,
            "observation": TensorDict(dict(observe(length).items()), batch_size=[length]),
            "action": torch.randn(length, 6),
            "valid": torch.ones(length, 1, dtype=torch.bool),
            "info": TensorDict({"control_steps": torch.full((length, 1), 2)}, batch_size=[length]),
        }
        for length in lengths
    ]
    batch = stack_episodes(episodes)
    advantages, adapter = torch.tensor([0.5, -0.5]), PI0_CFG_Adapter(policy)
    adapter.set_episodes(episodes)
    torch.manual_seed(0)
    alone = adapter.compute_weighted_loss(advantages)
    # Of every chunk of three actions two were executed.
    whole: dict[str, object] = {**dict(batch.items()), "valid_steps": torch.full((3, 2, 1), 2)}
    assert torch.equal(alone, weighted(policy, whole, advantages))
    assert torch.equal(alone, weighted(policy, whole, advantages.expand(3, 2).unsqueeze(-1)))
    assert not torch.equal(alone, weighted(policy, whole, -advantages))
    adapter.set_episodes(batch)
    ways: list[Callable[[], Tensor]] = [
        lambda: adapter.compute_weighted_loss(advantages),
        lambda: adapter.compute_weighted_loss(advantages=advantages),
        lambda: adapter.compute_weighted_loss(advantages.tolist()),
        lambda: adapter.compute_weighted_loss(advantages.numpy()),
        lambda: PI0_CFG_Adapter(policy).compute_weighted_loss(episodes, advantages),
    ]
    for loss in ways:
        torch.manual_seed(0)
        assert torch.equal(alone, loss())
    with refused(TypeError, "advantages"):
        adapter.compute_weighted_loss(batch)
    with refused(ValueError, "[3, 2]", "[2]", "[4]"):
        adapter.compute_weighted_loss(torch.ones(4))
    with refused(ValueError, "set_episodes(episodes)"):
        PI0_CFG_Adapter(policy).compute_weighted_loss(advantages)


def test_the_adapter_needs_a_flow_head() -> None:
    with refused(ConfigError, "policy.head", "flow"):
        PI0_CFG_Adapter(VLAPolicy(SPACE, ACTIONS, chunk=3))
