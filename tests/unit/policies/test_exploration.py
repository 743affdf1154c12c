"""The noise of gSDE: how long it lasts, whose it is, and where it goes."""

from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict
from tests.refusals import refused
from tests.scripted import ScriptedEnv

from apexrl import SyncCollector
from apexrl.algorithms import PPO
from apexrl.core.errors import ConfigError
from apexrl.core.types import ACTION, OBSERVATION, Carry
from apexrl.policies import ActorCritic, Policy, RecurrentActorCritic
from apexrl.policies.base import NOISE, NOISE_AGE
from apexrl.policies.config import PolicyConfig
from apexrl.rollout import initial_state, make_actor, rollout

SPACES = gym.spaces.Box(-1e6, 1e6, (2,)), gym.spaces.Box(-1, 1, (1,))
KINDS = ["mlp", "gru"]


def make_policy(kind: str = "mlp", interval: int = 3) -> Policy:
    torch.manual_seed(0)
    options: dict[str, Any] = {"hidden_dims": (8,), "gsde": True, "gsde_interval": interval, "init_std": 0.3}
    if kind == "mlp":
        return ActorCritic(*SPACES, actor_cfg=options)
    return RecurrentActorCritic(*SPACES, rnn_hidden_dim=6, **options)


def draws(policy: Policy, env: ScriptedEnv, num_steps: int) -> torch.Tensor:
    """Return the noise that each step used, ``[T, N]``: one number stands for a whole ε."""
    carry: Carry = {OBSERVATION: env.reset(), **initial_state(policy, env)}
    used = []
    actor = make_actor(policy, env.device)

    def watched(carry: Carry) -> dict[str, torch.Tensor]:
        output = actor(carry)
        used.append(output[NOISE][:, 0, 0])
        return output

    rollout(env, watched, carry, num_steps)
    return torch.stack(used)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_lasts_for_the_interval_and_ends_with_the_episode(kind: str) -> None:
    # The first environment's episodes have 5 steps, the second one's 7.
    noise = draws(make_policy(kind), ScriptedEnv([5, 7], [True, False]), 14)
    changes = [[t for t in range(1, 14) if noise[t, env] != noise[t - 1, env]] for env in range(2)]
    assert changes == [[3, 5, 8, 10, 13], [3, 6, 7, 10, 13]]
    assert len(noise.unique()) == 12  # none of the draws is another's, nor zero
    assert (noise != 0).all()


def test_an_interval_of_0_draws_once_an_episode() -> None:
    noise = draws(make_policy(interval=0), ScriptedEnv([5, 7], [True, False]), 14)
    assert [len(noise[:, env].unique()) for env in range(2)] == [3, 2]


def test_the_same_state_gets_the_same_action_while_the_noise_lasts() -> None:
    policy, obs = make_policy(interval=2), torch.randn(3, 2)
    first = policy.act({OBSERVATION: obs, **policy.initial_state(3)})
    second = policy.act({**first, OBSERVATION: obs})
    third = policy.act({**second, OBSERVATION: obs})
    assert torch.equal(first[ACTION], second[ACTION])
    assert not torch.isclose(second[ACTION], third[ACTION]).any()
    assert first[NOISE_AGE].flatten().tolist() == [1.0, 1.0, 1.0]
    assert second[NOISE_AGE].flatten().tolist() == [0.0, 0.0, 0.0]


def test_deterministic_actions_ignore_the_noise_and_keep_it() -> None:
    policy, obs = make_policy(), torch.randn(3, 2)
    carried = policy.act({OBSERVATION: obs, **policy.initial_state(3)})
    mode = policy.act({**carried, OBSERVATION: obs}, deterministic=True)
    assert torch.equal(mode[ACTION], policy(obs, deterministic=True).action)
    assert torch.equal(mode[NOISE], carried[NOISE])


@pytest.mark.parametrize("kind", KINDS)
def test_batches_hold_no_noise_and_are_evaluated_as_they_were_collected(kind: str) -> None:
    policy = make_policy(kind)
    collector = SyncCollector(ScriptedEnv([5, 7], [True, False]), policy, keep=PPO.required_keys, seed=0)
    batch: TensorDict = collector.collect(6)
    assert NOISE not in batch
    assert NOISE not in SyncCollector(ScriptedEnv([5, 7], [True, False]), policy, seed=0).collect(6)
    torch.testing.assert_close(policy.evaluate(batch).log_prob, batch["sample_log_prob"])
    assert NOISE in collector.state_dict()["carry"]


def test_single_observations_get_noise_of_their_own() -> None:
    policy = make_policy()
    output = policy(torch.ones(4, 2))
    assert len(output.action.unique()) == 4


def test_what_gsde_does_not_go_with() -> None:
    with refused(ConfigError, "policy.gsde", "policy.distribution", "gaussian"):
        ActorCritic(*SPACES, actor_cfg={"gsde": True, "distribution": "squashed_gaussian"})
    with refused(ConfigError, "policy.gsde", "policy.distribution", "gaussian"):
        ActorCritic(*SPACES, actor_cfg={"gsde": True, "state_dependent_std": True})
    with refused(ConfigError, "policy.gsde", "policy.kind", "mlp", "gru"):
        PolicyConfig(kind="roa", gsde=True)
    with refused(ConfigError, "policy.gsde_interval", -1):
        PolicyConfig(gsde_interval=-1)
