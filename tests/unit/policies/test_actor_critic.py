import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tests.refusals import refused
from tests.scripted import flat_gradient

from apexrl.algorithms.optimizer import FlatAdam
from apexrl.core.errors import ConfigError
from apexrl.policies import ActorCritic
from apexrl.policies.networks import MLPActor
from apexrl.policies.networks.distributions import DiagGaussian

BOX = gym.spaces.Box(-1.0, 1.0, (3,))
GROUPS = gym.spaces.Dict({"policy": gym.spaces.Box(-1, 1, (3,)), "priv": gym.spaces.Box(-1, 1, (2,))})
ACTIONS: dict[str, gym.Space] = {  # type: ignore[type-arg]
    "box": gym.spaces.Box(-2.0, 2.0, (2,)),
    "discrete": gym.spaces.Discrete(4),
    "multi_discrete": gym.spaces.MultiDiscrete([2, 3]),
    "multi_binary": gym.spaces.MultiBinary(3),
}
WIDTH = {"box": 2, "discrete": 1, "multi_discrete": 2, "multi_binary": 3}


@pytest.mark.parametrize("kind", list(ACTIONS))
@pytest.mark.parametrize("leading", [(5,), (4, 5)])
def test_shapes_for_every_action_space(kind: str, leading: tuple[int, ...]) -> None:
    policy = ActorCritic(BOX, ACTIONS[kind])
    action, log_prob, value = policy(torch.randn(*leading, 3))
    assert action.shape == (*leading, WIDTH[kind])
    assert action.is_floating_point() == (kind == "box")
    assert log_prob.shape == value.shape == (*leading, 1)


@pytest.mark.parametrize("kind", list(ACTIONS))
def test_a_stored_action_gets_its_log_probability_again(kind: str) -> None:
    policy = ActorCritic(BOX, ACTIONS[kind])
    obs = torch.randn(6, 3)
    action, log_prob, value = policy(obs)
    again, entropy = policy.evaluate_actions(obs, action)
    torch.testing.assert_close(again, log_prob)
    assert entropy.shape == (6, 1)
    torch.testing.assert_close(policy.get_value(obs), value)
    batch = TensorDict({"observation": obs, "action": action}, batch_size=[6])
    torch.testing.assert_close(policy.evaluate(batch).log_prob, log_prob)
    torch.testing.assert_close(policy.evaluate(batch).value, value)


def test_deterministic_actions_repeat_and_sampled_ones_vary() -> None:
    policy = ActorCritic(BOX, ACTIONS["box"])
    obs = torch.randn(6, 3)
    assert torch.equal(policy(obs, deterministic=True).action, policy(obs, deterministic=True).action)
    assert not torch.equal(policy(obs).action, policy(obs).action)


def test_act_takes_the_same_action_as_forward_without_the_critic() -> None:
    policy = ActorCritic(BOX, ACTIONS["box"])
    obs = torch.randn(6, 3)
    torch.manual_seed(0)
    expected = policy(obs)
    torch.manual_seed(0)
    policy.critic = torch.nn.Identity()  # would give another shape if it were used
    output = policy.act({"observation": obs})
    assert torch.equal(output["action"], expected.action)
    assert torch.equal(output["sample_log_prob"], expected.log_prob)


def groups(policy_value: float, priv_value: float) -> TensorDict:
    return TensorDict({"policy": torch.full((2, 3), policy_value), "priv": torch.full((2, 2), priv_value)}, [2])


def test_only_the_critic_sees_the_privileged_group() -> None:
    policy = ActorCritic(GROUPS, ACTIONS["box"])
    a, b = groups(0.5, 0.0), groups(0.5, 1.0)
    assert torch.equal(policy(a, deterministic=True).action, policy(b, deterministic=True).action)
    assert not torch.equal(policy.get_value(a), policy.get_value(b))


def test_groups_can_be_named_for_each_network() -> None:
    policy = ActorCritic(GROUPS, ACTIONS["box"], actor_cfg={"groups": ["priv"]}, critic_cfg={"groups": ["policy"]})
    a, b = groups(0.0, 0.5), groups(1.0, 0.5)
    assert torch.equal(policy(a, deterministic=True).action, policy(b, deterministic=True).action)
    assert not torch.equal(policy.get_value(a), policy.get_value(b))


def test_an_unknown_group_names_the_nearest() -> None:
    with refused(ConfigError, "'polcy'", "Did you mean 'policy'"):
        ActorCritic(GROUPS, ACTIONS["box"], actor_cfg={"groups": ["polcy"]})


@pytest.mark.parametrize("shape", [(3, 84, 84), (64, 64, 3), (12, 12, 1)])
def test_images_in_either_channel_order(shape: tuple[int, int, int]) -> None:
    policy = ActorCritic(gym.spaces.Box(0, 255, shape, np.uint8), ACTIONS["discrete"])
    images = torch.randint(0, 256, (2, 3, *shape), dtype=torch.uint8)
    output = policy(images)
    assert output.action.shape == (2, 3, 1)
    assert output.value.std() > 0, "different images, different values"


def test_nested_groups_with_images() -> None:
    space = gym.spaces.Dict(
        {
            "robot": gym.spaces.Dict({"joints": gym.spaces.Box(-1, 1, (2,)), "gripper": gym.spaces.Box(0, 1, ())}),
            "camera": gym.spaces.Box(0, 255, (16, 16, 3), np.uint8),
        }
    )
    obs = TensorDict(
        {
            "robot": {"joints": torch.randn(4, 2), "gripper": torch.rand(4)},
            "camera": torch.randint(0, 256, (4, 16, 16, 3), dtype=torch.uint8),
        },
        batch_size=[4],
    )
    policy = ActorCritic(space, ACTIONS["box"], normalize_obs=True)
    policy.update_normalizer(obs)
    value = policy.get_value(obs)
    changed = obs.clone()
    changed["robot", "gripper"] += 0.5
    assert not torch.equal(policy.get_value(changed), value)


def log_std_parameter(policy: ActorCritic) -> torch.nn.Parameter:
    assert isinstance(policy.actor, MLPActor)
    parameter = policy.actor.action_head.log_std
    assert parameter is not None
    return parameter


@pytest.mark.parametrize(("raw", "expected"), [(-50.0, 0.01), (50.0, 2.0)])
def test_standard_deviations_are_bounded_and_can_come_back(raw: float, expected: float) -> None:
    policy = ActorCritic(BOX, ACTIONS["box"], actor_cfg={"min_std": 0.01, "max_std": 2.0})
    parameter = log_std_parameter(policy)
    parameter.data.fill_(raw)
    distribution = policy.distribution(torch.randn(4, 3))
    assert isinstance(distribution, DiagGaussian)
    torch.testing.assert_close(distribution.std, torch.full((4, 2), expected))
    # Descent moves against the gradient: one way leads back inside, the other further out, where nothing changes.
    for sign, inwards in ((1.0, raw > 0), (-1.0, raw < 0)):
        (gradient,) = torch.autograd.grad(sign * distribution.log_std.sum(), parameter, retain_graph=True)
        torch.testing.assert_close(gradient, torch.full((2,), 4.0 * sign * inwards))


@pytest.mark.parametrize("state_dependent_std", [False, True])
def test_a_standard_deviation_held_at_its_bound_leaves_it_at_once(state_dependent_std: bool) -> None:
    torch.manual_seed(0)
    options = {"max_std": 2.0, "state_dependent_std": state_dependent_std}
    policy = ActorCritic(BOX, ACTIONS["box"], actor_cfg=options)
    optimizer = FlatAdam(policy.actor.named_parameters(), learning_rate=0.01, eps=1e-5, max_grad_norm=1.0)
    obs = torch.randn(4, 3)

    def steps_towards(sign: float, num_steps: int) -> list[float]:
        found = []
        for _ in range(num_steps):
            gradient = flat_gradient(optimizer, sign * policy.distribution(obs).entropy().mean())
            optimizer.step(gradient, gradient.norm(), torch.zeros(()))
            found.append(policy.distribution(obs).entropy().mean().item())
        return found

    most = 2 * (0.5 + 0.5 * math.log(2 * math.pi) + math.log(2.0))
    assert steps_towards(-1.0, 800)[-1] == pytest.approx(most)
    # What is left of Adam's momentum may move it on for a few steps; before, as many as had led outwards.
    back = steps_towards(1.0, 40)
    assert back[-1] < most - 0.1, back


def test_state_dependent_standard_deviation() -> None:
    policy = ActorCritic(BOX, ACTIONS["box"], actor_cfg={"state_dependent_std": True, "init_std": 0.5})
    distribution = policy.distribution(torch.randn(4, 3))
    assert isinstance(distribution, DiagGaussian)
    assert distribution.std.std(0).min() > 0, "it depends on the state"
    torch.testing.assert_close(distribution.std.mean(), torch.tensor(0.5), atol=0.05, rtol=0.0)


def test_squashed_actions_respect_the_bounds() -> None:
    policy = ActorCritic(BOX, ACTIONS["box"], actor_cfg={"distribution": "squashed_gaussian", "init_std": 5.0})
    action, log_prob, _ = policy(torch.randn(1000, 3))
    assert action.abs().max() <= 2.0
    assert log_prob.isfinite().all()


@pytest.mark.parametrize(
    ("space", "distribution", "needed"),
    [
        (ACTIONS["discrete"], "gaussian", "Box"),
        (ACTIONS["box"], "categorical", "discrete"),
        (gym.spaces.Box(-np.inf, np.inf, (1,)), "squashed_gaussian", "bounded"),
    ],
)
def test_a_distribution_that_does_not_fit_is_refused(space: gym.Space, distribution: str, needed: str) -> None:  # type: ignore[type-arg]
    with refused(ConfigError, distribution, needed, space):
        ActorCritic(BOX, space, actor_cfg={"distribution": distribution})


def test_the_normaliser_is_frozen_until_updated() -> None:
    policy = ActorCritic(BOX, ACTIONS["box"], normalize_obs=True)
    obs = torch.randn(100, 3) * 5 + 3
    before = policy.get_value(obs)
    policy.train()
    policy(obs)
    assert torch.equal(policy.get_value(obs), before)
    policy.update_normalizer(obs)
    assert not torch.equal(policy.get_value(obs), before)
    assert "normalizer.normalizers.observation.mean" in policy.state_dict(), "it is saved with the policy"


def test_values_use_the_true_successor_of_truncated_and_last_steps() -> None:
    policy = ActorCritic(BOX, ACTIONS["box"])
    obs, final = torch.randn(4, 2, 3), torch.randn(4, 2, 3)
    truncated = torch.zeros(4, 2, 1, dtype=torch.bool)
    truncated[1, 0] = True
    next_obs = torch.cat((obs[1:], final[-1:]))
    next_obs[1, 0] = final[1, 0]
    batch = TensorDict({"observation": obs, "next_observation": next_obs, "truncated": truncated}, batch_size=[4, 2])
    value, next_value = policy.values(batch)
    torch.testing.assert_close(value, policy.get_value(obs))
    torch.testing.assert_close(next_value, policy.get_value(next_obs))
