import gymnasium as gym
import torch
from tensordict import TensorDict
from tests.scripted import ScriptedEnv

from apexrl.policies import RecurrentActorCritic
from apexrl.rollout import initial_state, make_actor, rollout


def make_policy() -> RecurrentActorCritic:
    torch.manual_seed(0)
    return RecurrentActorCritic(
        gym.spaces.Box(-1e6, 1e6, (2,)), gym.spaces.Box(-1, 1, (1,)), hidden_dims=(8,), rnn_hidden_dim=6
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


def make_asymmetric() -> RecurrentActorCritic:
    torch.manual_seed(0)
    return RecurrentActorCritic(
        gym.spaces.Dict({"policy": gym.spaces.Box(-1, 1, (2,)), "priv": gym.spaces.Box(-1, 1, (3,))}),
        gym.spaces.Box(-1, 1, (1,)),
        hidden_dims=(8,),
        rnn_hidden_dim=6,
        critic_groups=("policy", "priv"),
        critic_hidden_dims=(8,),
        normalize_obs=True,
    )


def grouped(*shape: int) -> TensorDict:
    return TensorDict({"policy": torch.randn(*shape, 2), "priv": torch.randn(*shape, 3)}, shape)


def test_privileged_groups_reach_the_critic_and_never_the_memory() -> None:
    policy = make_asymmetric()
    obs = grouped(4)
    other = obs.clone()
    other["priv"] += 1.0
    hidden = torch.randn(4, 6)
    found, again = (policy.act({"observation": each, "hidden": hidden}, True) for each in (obs, other))
    torch.testing.assert_close(found["action"], again["action"], rtol=0, atol=0)
    torch.testing.assert_close(found["hidden"], again["hidden"], rtol=0, atol=0)
    assert ((policy.get_value(obs) - policy.get_value(other)).abs() > 1e-4).all()


def test_values_of_an_asymmetric_critic_equal_those_along_the_sequence() -> None:
    policy = make_asymmetric()
    done = torch.zeros(5, 4, 1, dtype=torch.bool)
    done[2, 1] = True
    obs, hidden = grouped(5, 4), [torch.randn(4, 6)]
    action = []
    for t in range(5):
        output = policy.act({"observation": obs[t], "hidden": hidden[-1]})
        action.append(output["action"])
        hidden.append(output["hidden"] * ~done[t])
    stored = {"observation": obs, "hidden": torch.stack(hidden[:-1]), "action": torch.stack(action), "done": done}
    batch = TensorDict(
        {**stored, "next_observation": grouped(5, 4), "terminated": done, "truncated": ~done & done}, [5, 4]
    )
    value, next_value = policy.values(batch)
    torch.testing.assert_close(value, policy.evaluate(batch).value)
    torch.testing.assert_close(next_value[0], value[1])
