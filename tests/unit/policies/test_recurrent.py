import gymnasium as gym
import torch
from tensordict import TensorDict
from tests.scripted import ScriptedEnv

from apexrl.policies import RecurrentActorCritic
from apexrl.rollout import initial_state, make_actor, rollout


def make_policy() -> RecurrentActorCritic:
    torch.manual_seed(0)
    return RecurrentActorCritic(
        gym.spaces.Box(-1e6, 1e6, (2,)), gym.spaces.Box(-1, 1, (1,)), hidden_dims=(8,), memory_dim=6
    )


def collect(policy: RecurrentActorCritic, num_steps: int) -> TensorDict:
    env = ScriptedEnv([3, 5], [True, False])
    carry = {"observation": env.reset() * 0.01, **initial_state(policy, env)}
    # Start in the middle of an episode, so that the first memory of the batch is not empty.
    _, carry = rollout(env, make_actor(policy, env.device), carry, 2)
    batch, _ = rollout(env, make_actor(policy, env.device), carry, num_steps)
    return batch


def test_evaluating_a_sequence_repeats_what_acting_gave() -> None:
    policy = make_policy()
    batch = collect(policy, 7)
    assert batch["hidden"][0].abs().max() > 0
    torch.testing.assert_close(policy.evaluate(batch).log_prob, batch["sample_log_prob"])


def test_a_memory_that_is_not_cleared_would_give_other_numbers() -> None:
    policy = make_policy()
    batch = collect(policy, 7)
    batch["done"] = torch.zeros_like(batch["done"])
    assert not torch.allclose(policy.evaluate(batch).log_prob, batch["sample_log_prob"])


def test_batched_values_equal_those_along_the_sequence() -> None:
    policy = make_policy()
    batch = collect(policy, 7)
    value, next_value = policy.values(batch)
    torch.testing.assert_close(value, policy.evaluate(batch).value)
    # Environment 0 is truncated at its third step: its successor goes on with the memory it had.
    t = int(batch["truncated"][:, 0].flatten().nonzero()[0])
    memory = policy.cell(policy.trunk(batch["observation"][t, :1]), batch["hidden"][t, :1])
    memory = policy.cell(policy.trunk(batch["next_observation"][t, :1]), memory)
    torch.testing.assert_close(next_value[t, 0], policy.value_head(memory)[0])
    torch.testing.assert_close(next_value[0, 1], value[1, 1])


def test_it_also_acts_on_single_observations() -> None:
    policy = make_policy()
    obs = torch.randn(4, 2)
    action, log_prob, value = policy(obs)
    torch.testing.assert_close(policy.evaluate_actions(obs, action)[0], log_prob)
    torch.testing.assert_close(policy.get_value(obs), value)
