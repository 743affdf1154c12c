import pytest
import torch
from tensordict import TensorDict
from tests.scripted import ScriptedEnv

from apexrl.algorithms import PPO, RLOO, SAC
from apexrl.collectors import SyncCollector
from apexrl.policies import ActorCritic


def make(**options: bool) -> tuple[ScriptedEnv, SyncCollector]:
    torch.manual_seed(0)
    env = ScriptedEnv([3, 5], [True, False], **options)
    return env, SyncCollector(env, ActorCritic.for_env(env))


def test_rollouts_go_on_where_the_last_one_stopped() -> None:
    _, collector = make()
    assert collector.collect(2)["observation"][:, 0, 0].tolist() == [0, 1]
    assert collector.collect(2)["observation"][:, 0, 0].tolist() == [2, 0]


def test_reset_cuts_the_running_episodes() -> None:
    _, collector = make()
    collector.collect(2)
    batch = collector.collect(3, reset=True)
    assert batch["observation"][:, 0, 0].tolist() == [0, 1, 2]
    # The cut episode is not counted: the one that ended since has return 1 + 2 + 3.
    assert collector.episode_metrics.means()["return"].item() == 6.0


def test_values_are_those_of_the_states_and_of_their_true_successors() -> None:
    _, collector = make()
    batch = collector.collect(4)
    critic = collector.policy.get_value
    torch.testing.assert_close(batch["value"], critic(batch["observation"]))
    # Environment 0 is truncated in state [3, 0], not in the reset state [0, 1].
    torch.testing.assert_close(batch["next_value"][2, 0], critic(torch.tensor([3.0, 0.0])))
    torch.testing.assert_close(batch["next_value"][3, 0], critic(torch.tensor([1.0, 1.0])))
    assert not batch["value"].requires_grad


def test_keep_limits_the_batch() -> None:
    env = ScriptedEnv([3], [True])
    collector = SyncCollector(env, ActorCritic.for_env(env), keep={"observation", "action"})
    assert set(collector.collect(2).keys()) == {
        "observation", "action", "reward", "terminated", "truncated", "done", "metric", "log"
    }  # fmt: skip


@pytest.mark.parametrize("keep", [PPO.required_keys, SAC.required_keys, RLOO.required_keys])
def test_what_an_algorithm_asks_for_is_what_there_would_be_of_everything(keep: frozenset[str]) -> None:
    def collect(keep: frozenset[str] | None) -> TensorDict:
        torch.manual_seed(0)
        env = ScriptedEnv([3, 5], [True, False])
        return SyncCollector(env, ActorCritic.for_env(env), keep=keep).collect(7)

    everything, batch = collect(None), collect(keep)
    assert set(batch.keys()) >= keep - {"advantage", "return", "valid", "group"}
    assert ("next_observation" in batch) == ("next_observation" in keep)
    for name in set(batch.keys()) - {"metric", "log"}:
        assert torch.equal(batch[name], everything[name]), name


def test_the_policy_acts_in_evaluation_mode() -> None:
    _, collector = make()
    collector.policy.train()
    modes: list[bool] = []
    actor = collector.policy.get_submodule("actor")
    actor.register_forward_hook(lambda *_: modes.append(collector.policy.training))
    collector.collect(2)
    assert modes == [False, False]


def test_a_simulator_that_hides_final_states_is_announced() -> None:
    with pytest.warns(UserWarning, match=r"ScriptedEnv.*last state"):
        make(gives_final_obs=False)


def test_state_goes_on_exactly() -> None:
    env, collector = make()
    collector.collect(4)
    state, env_state = collector.state_dict(), env.state_dict()
    torch.manual_seed(3)
    expected = collector.collect(4)
    other_env, other = make()
    other_env.load_state_dict(env_state)
    other.load_state_dict(state)
    torch.manual_seed(3)
    batch = other.collect(4)
    for key in ("observation", "action", "reward", "value"):
        assert torch.equal(batch[key], expected[key]), key
    assert other.episode_metrics.means()["return"] == collector.episode_metrics.means()["return"]
