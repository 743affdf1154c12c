"""Every path computes the same; nothing in the hot loops waits for the device."""

import gc
import random
import weakref
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from apexrl import PPO, ActorCritic, PPOConfig, RecurrentActorCritic, SyncCollector, make_env
from apexrl.core.system.acceleration import WARM_UP_CALLS, Acceleration, Captured, Compiled


def weights_after(
    acceleration: Acceleration, task: str, iterations: int, recurrent: bool = False, gsde: bool = False
) -> Tensor:
    torch.manual_seed(0)
    env = make_env(task, 8)
    options: dict[str, Any] = {"actor_cfg": {"gsde": True, "gsde_interval": 5, "init_std": 0.2}} if gsde else {}
    policy = (RecurrentActorCritic if recurrent else ActorCritic).for_env(env, normalize_obs=True, **options)
    algorithm = PPO(policy=policy, cfg=PPOConfig(num_steps=16, num_epochs=2), acceleration=acceleration)
    collector = SyncCollector(env, policy, keep=PPO.required_keys, seed=0, acceleration=acceleration)
    for _ in range(iterations):
        algorithm.update(collector.collect(16))
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("gsde", [False, True])
def test_compiled_and_eager_agree_over_five_iterations(gsde: bool) -> None:
    eager = weights_after(Acceleration(), "lift", 5, gsde=gsde)
    compiled = weights_after(Acceleration(compile=True), "lift", 5, gsde=gsde)
    torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-4)
    start = weights_after(Acceleration(), "lift", 0, gsde=gsde)
    assert (eager - start).abs().max() > 1e-3, "the weights moved by more than the tolerance"


def test_a_compiled_actor_takes_observations_that_are_slices() -> None:
    """The first observation of a rollout is a copy, those after it are slices of the task's state."""
    actions = []
    for acceleration in (Acceleration(), Acceleration(compile=True)):
        torch.manual_seed(0)
        env = make_env("payload", 4)
        obs = env.reset(seed=0)
        assert not isinstance(obs, Tensor)
        assert not obs["policy"].is_contiguous()
        collector = SyncCollector(env, ActorCritic.for_env(env), seed=0, acceleration=acceleration)
        actions.append(torch.cat([collector.collect(3)["action"].clone() for _ in range(2)]))
    torch.testing.assert_close(actions[0], actions[1])


@pytest.mark.filterwarnings("ignore:.*")
def test_compiled_functions_see_new_weights_and_shapes() -> None:
    class Scaled:
        def __init__(self) -> None:
            self.weight, self.factor = torch.ones(3), 1.0

        def run(self, groups: dict[str, Tensor], add_one: bool) -> dict[str, Tensor]:
            return {name: self.factor * value * self.weight + add_one for name, value in groups.items()}

    scaled = Scaled()
    compiled = Compiled(scaled.run, torch.device("cpu"))
    two = {"a": torch.full((2, 3), 2.0)}
    assert compiled(two, False)["a"].tolist() == [[2.0] * 3] * 2
    scaled.weight.mul_(5.0)
    assert compiled(two, False)["a"].tolist() == [[10.0] * 3] * 2
    scaled.weight.fill_(7.0)
    assert compiled({"a": torch.ones(1, 3)}, False)["a"].tolist() == [[7.0] * 3]
    assert compiled(two, False)["a"].tolist() == [[14.0] * 3] * 2


def test_a_function_that_cannot_be_compiled_runs_as_it_is() -> None:
    def halves(x: Tensor) -> Tensor:
        return x / (2 if x.sum() > 0 else 4)

    compiled = Compiled(halves, torch.device("cpu"))
    with pytest.warns(UserWarning, match="Compilation failed, so this runs uncompiled"):
        assert compiled(torch.full((4,), 2.0)).tolist() == [1.0] * 4
    assert compiled(torch.full((4,), -6.0)).tolist() == [-1.5] * 4


def test_what_is_compiled_has_another_name_in_every_run_of_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[float] = []

    class Whole:
        def aot_compile(self, _: Any) -> Any:
            names.append(random.random())  # as PyTorch names what it keeps on disk
            raise RuntimeError

    monkeypatch.setattr(torch, "compile", lambda function, **options: Whole() if "fullgraph" in options else function)
    for _ in range(2):
        random.seed(0)
        Compiled(torch.neg, torch.device("cuda"))(torch.ones(1))
        assert random.random() == random.Random(0).random(), "the run's own random numbers go on as if nothing had been"
    assert names[0] != names[1]


def test_bf16_stays_near_full_precision() -> None:
    full = weights_after(Acceleration(), "lift", 1)
    half = weights_after(Acceleration(precision="bf16"), "lift", 1)
    assert not torch.equal(full, half), "the option is read"
    torch.testing.assert_close(half, full, rtol=0.0, atol=1e-2)


READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize(("schedule", "stale"), [("adaptive", False), ("linear", True)])
def test_nothing_is_read_back_in_rollout_and_update(
    schedule: Any, stale: bool, recurrent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    env = make_env("lift", 8)
    policy = (RecurrentActorCritic if recurrent else ActorCritic).for_env(env, normalize_obs=True)
    cfg = PPOConfig(num_steps=16, schedule=schedule, target_kl=0.01, normalize_reward=True)
    algorithm = PPO(policy=policy, cfg=cfg)
    collector = SyncCollector(env, policy, keep=PPO.required_keys, seed=0)
    version = {"policy_version": torch.zeros(16, 8, 1, dtype=torch.long)} if stale else {}
    algorithm.update(collector.collect(16).update(version))
    reads: list[str] = []

    def counting(name: str) -> Any:
        original = getattr(Tensor, name)

        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            reads.append(name)
            return original(self, *args, **kwargs)

        return read

    with monkeypatch.context() as patch:
        for name in READS:
            patch.setattr(Tensor, name, counting(name))
        algorithm.update(collector.collect(16).update(version))
        assert reads == []
        bool(torch.zeros(1))
        assert reads == ["__bool__"], "the counter counts"


def test_what_nothing_accelerates_is_called_itself() -> None:
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    assert Acceleration().wrap(doubled, torch.device("cpu")) is doubled
    assert Acceleration(graphs=True).wrap(doubled, torch.device("cpu"), graph="double") is doubled, "no CUDA"
    assert Acceleration(graphs=False).wrap(doubled, torch.device("cuda"), graph="double") is doubled
    assert isinstance(Acceleration(graphs=True).wrap(doubled, torch.device("cuda"), graph="double"), Captured)
    assert isinstance(Acceleration(compile=True).wrap(doubled, torch.device("cpu")), Compiled)


class Cycle:
    """Garbage that only the collector can free."""

    def __init__(self) -> None:
        self.me = self


def test_garbage_is_collected_before_a_capture_and_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("graph", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    for name in ("CUDAGraph", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    seen = []

    def function() -> None:
        seen.append((old(), gc.isenabled()))

    captured = Captured("a function", function)
    old = weakref.ref(Cycle())
    gc.disable()  # or the garbage might be gone before
    for _ in range(WARM_UP_CALLS):
        captured()
    gc.enable()
    assert None not in (garbage for garbage, _ in seen)
    seen.clear()
    captured()
    assert seen == [(None, False)]
    assert gc.isenabled()
