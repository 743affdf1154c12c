import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.refusals import refused
from tests.scripted import ScriptedEnv
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import apexrl
from apexrl import PPO, ActorCritic, OnPolicyRunner, SyncCollector
from apexrl.core.errors import ConfigError, EnvError
from apexrl.core.types import Carry, EnvStep
from apexrl.rollout import rollout


def constant_actor(carry: Carry) -> dict[str, Tensor]:
    return {"action": torch.zeros(len(carry["observation"]), 1)}


def run(env: ScriptedEnv, num_steps: int, **options: object) -> tuple[TensorDict, Carry]:
    return rollout(env, constant_actor, {"observation": env.reset()}, num_steps, **options)  # type: ignore[arg-type]


def test_the_batch_holds_what_the_environment_gave() -> None:
    batch, carry = run(ScriptedEnv([3, 2], [False, True]), 4)
    assert batch.batch_size == torch.Size([4, 2])
    assert batch["observation"][:, 0, 0].tolist() == [0, 1, 2, 0]
    assert batch["observation"][:, 1, 0].tolist() == [100, 101, 100, 101]
    assert batch["reward"].squeeze(-1).T.tolist() == [[1, 2, 3, 1], [1, 2, 1, 2]]
    assert batch["terminated"].squeeze(-1).T.tolist() == [[False, False, True, False], [False] * 4]
    assert batch["truncated"].squeeze(-1).T.tolist() == [[False] * 4, [False, True, False, True]]
    assert torch.equal(batch["done"], batch["terminated"] | batch["truncated"])
    assert carry["observation"][:, 0].tolist() == [1, 100]


class DictionaryEnv(ScriptedEnv):
    """Returns its groups as a plain dictionary."""

    def reset(self, seed: int | None = None) -> Any:
        return {"time": super().reset(seed)}

    def step(self, action: Tensor) -> EnvStep:
        step = super().step(action)
        groups: Any = {"time": step.obs}
        final: Any = None if step.final_obs is None else {"time": step.final_obs}
        return step._replace(obs=groups, final_obs=final)


def test_an_environment_may_return_its_groups_as_a_dictionary() -> None:
    scripts = [3, 2], [False, True]
    grouped, plain = (rollout_of(env(*scripts)) for env in (DictionaryEnv, ScriptedEnv))
    assert sorted(grouped.keys()) == sorted(plain.keys())
    for name in ("observation", "next_observation"):
        assert torch.equal(grouped[name, "time"], plain[name])


def rollout_of(env: ScriptedEnv) -> TensorDict:
    carry = {"observation": env.reset()}
    return rollout(env, lambda _: {"action": torch.zeros(2, 1)}, carry, 4)[0]


def test_observations_are_copied_out_of_the_simulators_buffer() -> None:
    env = ScriptedEnv([9], [False])
    batch, _ = run(env, 3)
    env.buffer.fill_(-1.0)
    assert batch["observation"][:, 0, 0].tolist() == [0, 1, 2]


def test_the_successor_of_an_ended_episode_is_its_own_last_state() -> None:
    batch, _ = run(ScriptedEnv([3, 2], [False, True]), 4)
    assert batch["next_observation"][:, 0, 0].tolist() == [1, 2, 3, 1]
    assert batch["next_observation"][:, 1, 0].tolist() == [101, 102, 101, 102]
    assert batch["next_observation"][:, 1, 1].tolist() == [0, 0, 1, 1], "the episode counter of the ended episode"


def test_a_hidden_successor_is_replaced_by_the_last_visible_state_not_by_the_reset() -> None:
    batch, _ = run(ScriptedEnv([2], [True], gives_final_obs=False), 3)
    assert batch["next_observation"][:, 0, 0].tolist() == [1, 1, 1]
    assert batch["next_observation"][:, 0, 1].tolist() == [0, 0, 1]


class NumberedEnv(ScriptedEnv):
    """Also says, as control data, which episode a step belongs to."""

    def step(self, action: Tensor) -> EnvStep:
        number = self.episode.clone().unsqueeze(-1)
        return super().step(action)._replace(info={"episode_id": number})


def test_control_data_is_stored_as_it_is_and_no_metric_comes_of_it() -> None:
    env = NumberedEnv([3, 2], [False, True])
    batch, _ = run(env, 4, keep=())
    assert batch["info", "episode_id"].dtype == torch.int64
    assert batch["info", "episode_id"].squeeze(-1).T.tolist() == [[0, 0, 0, 1], [0, 0, 1, 1]]
    collector = SyncCollector(env, ActorCritic.for_env(env))
    collector.collect(6)
    assert set(collector.episode_metrics) == {
        "return", "episode_len", "reward", "success_once", "success_at_end", "odd",
    }  # fmt: skip


def test_keep_stores_only_what_is_asked_for() -> None:
    batch, _ = run(ScriptedEnv([3], [False]), 2, keep=("action",))
    assert set(batch.keys()) == {"action", "reward", "terminated", "truncated", "done", "metric", "log"}


def test_metrics_and_log_are_stored_and_a_missing_value_is_nan() -> None:
    batch, _ = run(ScriptedEnv([3, 2], [False, True]), 3)
    odd = batch["metric", "odd"].squeeze(-1)
    assert odd[0].tolist() == [1, 1]
    assert odd.isnan().T.tolist() == [[False, False, True], [False, True, False]]
    assert batch["log", "height"][:, 0, 0].tolist() == [1.0, 2.0, 2.0]


def test_until_done_stops_when_the_slowest_environment_has_ended() -> None:
    batch, _ = run(ScriptedEnv([3, 5], [False, False]), 100, until_done=True)
    assert batch.batch_size == torch.Size([5, 2])


def test_recurrent_state_is_carried_stored_and_zeroed_where_an_episode_ended() -> None:
    def counting_actor(carry: Carry) -> dict[str, Tensor]:
        return {"action": torch.zeros(2, 1), "hidden": carry["hidden"] + 1}

    env = ScriptedEnv([2, 9], [False, False])
    batch, carry = rollout(env, counting_actor, {"observation": env.reset(), "hidden": torch.zeros(2, 1)}, 3)
    assert batch["hidden"].squeeze(-1).T.tolist() == [[0, 1, 0], [0, 1, 2]]
    assert carry["hidden"].flatten().tolist() == [1, 3]


def test_two_rollouts_go_on_where_one_would() -> None:
    env = ScriptedEnv([3, 2], [False, True])
    whole, _ = run(env, 6)
    first, carry = run(env, 2)
    second, _ = rollout(env, constant_actor, carry, 4)
    joined = TensorDict.cat([first, second])
    for key in ("observation", "reward", "done", "next_observation"):
        assert torch.equal(joined[key], whole[key]), key


def test_nothing_in_the_batch_needs_gradients() -> None:
    weight = torch.ones(1, requires_grad=True)
    env = ScriptedEnv([3], [False])
    batch, _ = rollout(
        env, lambda carry: {"action": carry["observation"][:, :1] * weight}, {"observation": env.reset()}, 2
    )
    assert not batch["action"].requires_grad


def test_a_final_observation_of_another_shape_is_refused() -> None:
    class Narrow(ScriptedEnv):
        def step(self, action: Tensor) -> EnvStep:
            step = super().step(action)
            narrow = torch.zeros(1, 1)  # would be spread over both columns
            return EnvStep(step.obs, step.reward, step.terminated, step.truncated, narrow, step.metric, step.log)

    with refused(EnvError, "final_obs", [1, 1], [1, 2]):
        run(Narrow([2], [True]), 3)


def places_with(*words: str) -> list[str]:
    source = Path(apexrl.__file__).parent
    return [
        str(path.relative_to(source))
        for path in sorted(source.rglob("*.py"))
        for line in path.read_text().splitlines()
        if any(word in line for word in words)
    ]


def test_the_environment_is_stepped_in_one_place_of_the_package() -> None:
    # Inside envs/, checks and wrappers step what they check or wrap; elsewhere only optimizers and plots step.
    source = Path(apexrl.__file__).parent
    stepped = {
        (str(path.relative_to(source)), ast.unparse(call.func))
        for path in source.rglob("*.py")
        if path.parts[len(source.parts)] != "envs"
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "step"
    }
    assert {(path, call) for path, call in stepped if "optimizer" not in call and "axes" not in call} == {
        ("rollout.py", "env.step")
    }
    assert places_with("methodcaller") == []


@pytest.mark.parametrize("num_steps", [0, -1])
def test_a_rollout_without_steps_is_refused(num_steps: int) -> None:
    env = ScriptedEnv([3], [False])
    policy = ActorCritic.for_env(env)
    with refused(ConfigError, "num_steps", 1, num_steps):
        OnPolicyRunner(env, agent=PPO(policy=policy)).rollout(None, num_steps)
    with refused(ConfigError, "num_steps", 1, num_steps):
        SyncCollector(env, policy).collect(num_steps)


class Allocated(TorchDispatchMode):
    """Counts the rows of two numbers, which here are observations, that new memory is taken for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        is_new = func.overloadpacket.__name__ in {"empty", "cat", "clone", "stack", "where", "index", "zeros", "full"}
        if is_new and isinstance(found, Tensor) and found.shape[-1:] == (2,):
            self.rows += found.numel() // 2
        return found


def test_a_dropped_successor_is_never_built() -> None:
    def count(**options: Any) -> int:
        env = ScriptedEnv([3, 2], [False, True])
        env.reset()
        with Allocated() as by_the_env:
            for _ in range(4):
                env.step(torch.zeros(2, 1))
        carry = {"observation": env.reset()}
        with Allocated() as allocated:
            batch, _ = rollout(env, constant_actor, carry, 4, **options)
        assert ("next_observation" in batch) == (not options)
        rows: int = allocated.rows - by_the_env.rows
        return rows

    assert count(drop=("next_observation",)) == 4 * 2  # the observations alone
    assert count() > 2 * 4 * 2


def test_what_is_dropped_is_not_in_the_batch_and_the_rest_is_the_same() -> None:
    whole, _ = run(ScriptedEnv([3, 2], [False, True]), 4)
    batch, _ = run(ScriptedEnv([3, 2], [False, True]), 4, drop=("next_observation", "log"))
    assert set(batch.keys()) == set(whole.keys()) - {"next_observation", "log"}
    for name in set(batch.keys()) - {"metric"}:
        assert torch.equal(batch[name], whole[name]), name
