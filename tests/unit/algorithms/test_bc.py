"""Behaviour cloning, each option with a test that fails when it is ignored."""

import copy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tests.point_suite import PointSuite
from tests.refusals import refused
from torch import Tensor

from apexrl.algorithms.bc import BC, BCConfig, randomly_moved
from apexrl.collectors.demonstrations.record import record_demos
from apexrl.collectors.demonstrations.samples import load_demos
from apexrl.core.errors import ConfigError, DivergenceError
from apexrl.core.system.acceleration import Acceleration
from apexrl.envs.suites.env import SuiteVecEnv
from apexrl.policies import ActorCritic, Policy
from apexrl.policies.vla import VLAPolicy

SPACE = gym.spaces.Dict(
    {"state": gym.spaces.Box(-9, 9, (3,), np.float32), "instruction": gym.spaces.Box(0, 255, (96,), np.uint8)}
)
ACTIONS = gym.spaces.Box(-1, 1, (4,), np.float32)
LINEAR = torch.tensor([[0.5, 0.0, 0.2, -0.3], [0.0, 0.4, -0.2, 0.1], [0.1, 0.1, 0.3, 0.0]])


def demonstrations(count: int = 200, seed: int = 0) -> TensorDict:
    """An expert that is linear in the state; the last state number stood still."""
    random = torch.Generator().manual_seed(seed)
    state = torch.randn(count, 3, generator=random) * torch.tensor([2.0, 0.5, 0.0]) + torch.tensor([1.0, -1.0, 0.7])
    obs = {"state": state, "instruction": torch.zeros(count, 96, dtype=torch.uint8)}
    action = (state @ LINEAR).clamp(-1, 1)
    return TensorDict({"observation": TensorDict(obs, batch_size=[count]), "action": action}, batch_size=[count])


def mlp(seed: int = 0, **options: Any) -> ActorCritic:
    torch.manual_seed(seed)
    actor = {"groups": ["state"], "init_std": 0.6, **options}
    return ActorCritic(SPACE, ACTIONS, actor_cfg=actor, critic_cfg={"groups": ["state"]}, normalize_obs=True)


def vla(seed: int = 0, **options: Any) -> VLAPolicy:
    torch.manual_seed(seed)
    return VLAPolicy(SPACE, ACTIONS, chunk=2, width=32, depth=1, num_heads=2, **options)


def weights(policy: Policy) -> Tensor:
    return torch.cat([p.detach().flatten() for p in policy.parameters()]).clone()


@torch.no_grad()
def error(policy: Policy, samples: TensorDict) -> float:
    error: Tensor = policy(samples["observation"], deterministic=True).action - samples["action"]
    return error.abs().mean().item()


@pytest.mark.parametrize(
    ("policy", "options", "steps"),
    [
        (mlp, {}, 400),
        (mlp, {"learn_std": True}, 400),
        (lambda: mlp(distribution="squashed_gaussian"), {}, 400),
        (vla, {}, 200),
        (lambda: vla(head="flow"), {}, 300),
    ],
    ids=["mse", "likelihood", "squashed", "vla", "flow"],
)
def test_the_policy_does_what_the_demonstrations_do(policy: Any, options: dict[str, Any], steps: int) -> None:
    learner = policy()
    held_out = demonstrations(seed=1)
    before = error(learner, held_out)
    metrics = BC(policy=learner, cfg=BCConfig(learning_rate=3e-3, **options)).fit(demonstrations(), steps)
    assert metrics["nonfinite"] == 0.0
    assert error(learner, held_out) < min(0.1, 0.3 * before)


def test_the_standard_deviation_stays_unless_it_is_to_be_learned() -> None:
    for learn_std in (False, True):
        policy = mlp()
        BC(policy=policy, cfg=BCConfig(learning_rate=3e-3, learn_std=learn_std)).fit(demonstrations(), 300)
        std: Tensor = policy.actor.action_head.log_std.exp()  # type: ignore[union-attr,operator]
        if learn_std:
            assert std.max() < 0.4
        else:
            torch.testing.assert_close(std, torch.full((4,), 0.6))


def test_the_critic_stays_as_it_is() -> None:
    policy = mlp()
    before = {name: value.clone() for name, value in policy.critic.state_dict().items()}
    BC(policy=policy).fit(demonstrations(), 3)
    for name, value in policy.critic.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_statistics_of_an_mlp_are_those_of_the_demonstrations_with_a_lower_bound() -> None:
    policy, samples = mlp(), demonstrations(1000)
    assert policy.normalizer is not None
    policy.normalizer.update(TensorDict({"state": torch.full((50, 3), 7.0)}, batch_size=[50]))  # forgotten
    BC(policy=policy, cfg=BCConfig(min_std=0.2)).set_statistics(samples)
    state: Any = policy.normalizer.normalizers["state"]
    expected = samples["observation"]["state"].double()
    torch.testing.assert_close(state.mean, expected.mean(0))
    # The last number stood still, so one unit of it is 0.2, not a ten-thousandth.
    torch.testing.assert_close(state.var.sqrt()[:2], expected.std(0, unbiased=False)[:2])
    assert state.var[2].item() == pytest.approx(0.04)


def test_the_statistics_of_a_vla_are_those_of_states_and_single_actions() -> None:
    policy, samples = vla(), demonstrations(1000)
    BC(policy=policy, cfg=BCConfig(min_std=0.2, min_action_std=0.25)).set_statistics(samples)
    scaling = policy.scaling
    torch.testing.assert_close(scaling.state_mean, samples["observation"]["state"].mean(0))
    assert scaling.state_std[2].item() == pytest.approx(0.2)
    single = samples["action"].reshape(-1, 2)
    torch.testing.assert_close(scaling.action_mean, single.mean(0).repeat(2))
    torch.testing.assert_close(scaling.action_std, single.std(0, unbiased=False).clamp_min(0.25).repeat(2))


def fitted(**options: Any) -> Tensor:
    policy = mlp()
    algorithm = BC(policy=policy, cfg=BCConfig(**options))
    torch.manual_seed(1)
    algorithm.fit(demonstrations(), 20)
    return weights(policy)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 16},
        {"learning_rate": 1e-2},
        {"schedule": "linear"},
        {"weight_decay": 1.0},
        {"state_noise": 0.1},
        {"loss": "likelihood"},
        {"learn_std": True},
        {"min_std": 1.0},
        {"max_grad_norm": 1e-9},
        {"adam_eps": 1.0},
    ],
    ids=str,
)
def test_an_option_changes_what_is_learned(options: dict[str, Any]) -> None:
    assert not torch.equal(fitted(**options), fitted())


def test_micro_batches_add_up() -> None:
    gradients = []
    for size in (None, 7):
        algorithm = BC(policy=mlp(), cfg=BCConfig(micro_batch_size=size, max_grad_norm=1e9))
        algorithm.update(demonstrations(50))
        gradients.append(algorithm.optimizer.gradient)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)
    assert gradients[0].norm() > 0.01


def test_weight_decay_shrinks_the_weights() -> None:
    policy = mlp()
    algorithm = BC(policy=policy, cfg=BCConfig(weight_decay=0.5, learning_rate=0.1, max_grad_norm=1e-30))
    before = algorithm.optimizer.flat.clone()
    algorithm.update(demonstrations(50))
    # Adam's own step is as good as nothing against ε: 1 − 0.1 · 0.5.
    torch.testing.assert_close(algorithm.optimizer.flat, 0.95 * before, rtol=1e-5, atol=1e-5)


def seen_in_an_update(samples: TensorDict, **options: Any) -> TensorDict:
    """The observations that a policy is shown for demonstrated actions, which stay as they are."""
    policy, seen = mlp(), []
    as_it_was = copy.deepcopy(policy)
    distribution = policy.distribution

    def spy(obs: TensorDict) -> Any:
        seen.append(obs.clone())
        return distribution(obs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(policy, "distribution", spy)
        loss = BC(policy=policy, cfg=BCConfig(**options)).update(samples)["loss"]
    (obs,) = seen
    expected = (as_it_was.distribution(obs).mode - samples["action"]).square().mean()
    torch.testing.assert_close(loss, expected.detach())
    return obs


def test_noise_shakes_the_state_and_nothing_else() -> None:
    samples = demonstrations(5000)
    shaken = seen_in_an_update(samples, state_noise=0.5)
    difference = shaken["state"] - samples["observation"]["state"]
    assert difference.std().item() == pytest.approx(0.5, rel=0.05)
    assert torch.equal(shaken["instruction"], samples["observation"]["instruction"])
    assert torch.equal(samples["observation"]["state"], demonstrations(5000)["observation"]["state"])


@pytest.mark.parametrize("channels_last", [True, False])
def test_images_move_within_bounds_and_borders_are_drawn_out(channels_last: bool) -> None:
    torch.manual_seed(0)
    images = torch.randint(256, (400, 5, 6, 3), dtype=torch.uint8)
    given = images if channels_last else images.permute(0, 3, 1, 2)
    moved = randomly_moved(given, 2)
    assert moved.dtype == torch.uint8
    assert moved.shape == given.shape
    moved = moved if channels_last else moved.permute(0, 2, 3, 1)
    seen = set()
    for image, result in zip(images.numpy(), moved.numpy(), strict=True):
        padded = np.pad(image, ((2, 2), (2, 2), (0, 0)), mode="edge")
        windows = {(y, x): padded[y : y + 5, x : x + 6] for y in range(5) for x in range(5)}
        found = [place for place, window in windows.items() if np.array_equal(window, result)]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) == 25


def test_a_shift_reaches_what_is_learned() -> None:
    def fitted_to_images(shift: int) -> Tensor:
        torch.manual_seed(0)
        space = gym.spaces.Dict({"camera": gym.spaces.Box(0, 255, (16, 16, 3), np.uint8)})
        policy = VLAPolicy(space, gym.spaces.Box(-1, 1, (4,), np.float32), chunk=2, size="tiny")
        images = torch.randint(256, (32, 16, 16, 3), dtype=torch.uint8)
        samples = TensorDict({"observation": {"camera": images}, "action": torch.rand(32, 4)}, batch_size=[32])
        BC(policy=policy, cfg=BCConfig(image_shift=shift)).update(samples)
        return weights(policy)

    assert torch.equal(fitted_to_images(0), fitted_to_images(0))
    assert not torch.equal(fitted_to_images(2), fitted_to_images(0))


def test_a_shift_changes_images_and_nothing_else() -> None:
    samples = demonstrations(50)
    samples["observation"]["camera"] = torch.randint(256, (50, 8, 8, 3), dtype=torch.uint8)
    moved = seen_in_an_update(samples, image_shift=3)
    assert not torch.equal(moved["camera"], samples["observation"]["camera"])
    for key in ("state", "instruction"):
        assert torch.equal(moved[key], samples["observation"][key])
    with refused(ConfigError, "algo.image_shift", -1):
        BCConfig(image_shift=-1)


def test_a_shift_without_images_is_refused() -> None:
    with refused(ConfigError, "algo.image_shift", 3):
        BC(policy=mlp(), cfg=BCConfig(image_shift=3)).update(demonstrations(50))


def test_a_loaded_state_goes_on_bit_for_bit() -> None:
    one = BC(policy=mlp())
    one.update(demonstrations(seed=1))
    two = BC(policy=mlp(seed=5))
    two.policy.load_state_dict(one.policy.state_dict())
    two.load_state_dict(one.state_dict())
    for each in (one, two):
        each.update(demonstrations(seed=2))
    assert torch.equal(weights(one.policy), weights(two.policy))


def test_progress_is_told_to_the_end() -> None:
    told: list[int] = []
    BC(policy=mlp(), cfg=BCConfig(num_updates=7)).fit(demonstrations(), on_progress=told.append)
    assert told == [1, 2, 3, 4, 5, 6, 7]


def test_what_is_not_finite_is_reported() -> None:
    samples = demonstrations(20)
    samples["action"][3, 1] = torch.nan
    policy = mlp()
    before = weights(policy)
    with refused(DivergenceError, "'action'"):
        BC(policy=policy).fit(samples, 3)
    assert torch.equal(weights(policy), before)


def test_bf16_learns_too() -> None:
    policy = mlp()
    cfg = BCConfig(learning_rate=3e-3)
    BC(policy=policy, cfg=cfg, acceleration=Acceleration(precision="bf16")).fit(demonstrations(), 300)
    assert error(policy, demonstrations(seed=1)) < 0.1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_updates": 0}, ("algo.num_updates", 1, 0)),
        ({"min_std": 0.0}, ("algo.min_std", 0.0)),
        ({"weight_decay": -1.0}, ("algo.weight_decay", -1.0)),
        ({"loss": "mse", "learn_std": True}, ("algo.loss", "mse", "algo.learn_std")),
        ({"loss": "nll"}, ("algo.loss", "'nll'")),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], named: tuple[object, ...]) -> None:
    with refused(ConfigError, *named):
        BCConfig(**options)


def test_demonstrations_of_a_suite_become_a_policy_that_solves_it(tmp_path: Path) -> None:
    suite = PointSuite(num_tasks=1, num_states=10)
    record_demos(suite, tmp_path, 10)
    env = SuiteVecEnv(suite, 10, chunk=2, num_workers=0, split="val")
    torch.manual_seed(0)
    actor = {"groups": ["state"]}
    policy = ActorCritic.for_env(env, actor_cfg=actor, critic_cfg=actor, normalize_obs=True)
    BC(policy=policy, cfg=BCConfig(num_updates=400)).fit(load_demos(tmp_path, suite, 2))
    simulators = []
    for state in suite.init_states(0, "val"):
        simulator = suite.make_simulator(0)
        simulator.restore(state)
        simulators.append(_solves(simulator, policy))
    assert sum(simulators) >= 9


@torch.no_grad()
def _solves(simulator: Any, policy: Policy) -> bool:
    for _ in range(10):
        seen = torch.from_numpy(simulator.observe()["state"])
        obs = TensorDict({"state": seen, "instruction": torch.zeros(96, dtype=torch.uint8)}, batch_size=[])
        for action in policy(obs, deterministic=True).action.reshape(2, 2).numpy():
            if simulator.advance(action):
                return True
    return False
