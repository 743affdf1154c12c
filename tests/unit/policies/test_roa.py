"""Teacher and student: shared networks, what each of them sees, every kind of history."""

import copy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tests.refusals import refused

from apexrl import ROAPolicy, make_env
from apexrl.core.errors import ConfigError
from apexrl.policies import Policy
from apexrl.rollout import make_actor, rollout

HISTORY, FRAME = 10, 3
GROUPS = {"policy": HISTORY * FRAME, "command": 2, "object": 1, "priv": 4}
KINDS = ("mlp", "conv", "gru")


def space(*left_out: str) -> gym.spaces.Dict:
    return gym.spaces.Dict(
        {name: gym.spaces.Box(-np.inf, np.inf, (size,)) for name, size in GROUPS.items() if name not in left_out}
    )


def make_policy(observation_space: gym.Space[Any] | None = None, **options: Any) -> ROAPolicy:
    torch.manual_seed(0)
    small = {"history": HISTORY, "hidden_dims": (16,), "encoder_dims": (8,), "adapt_dims": (16,), "num_features": 5}
    action_space = options.pop("action_space", gym.spaces.Box(-1.0, 1.0, (2,)))
    return ROAPolicy(observation_space or space(), action_space, **{**small, **options})


def observe(*shape: int, left_out: tuple[str, ...] = ()) -> TensorDict:
    groups = {name: torch.randn(*shape, size) for name, size in GROUPS.items() if name not in left_out}
    return TensorDict(groups, batch_size=shape)


def mode(policy: Policy, obs: TensorDict) -> torch.Tensor:
    return policy.act({"observation": obs}, deterministic=True)["action"]


# Shared networks


@pytest.mark.parametrize("normalize_obs", [False, True])
def test_teacher_and_student_share_every_network_with_the_whole(normalize_obs: bool) -> None:
    policy = make_policy(normalize_obs=normalize_obs)
    assert isinstance(policy.teacher, Policy)
    assert isinstance(policy.student, Policy)
    assert {name.split(".")[0] for name in policy.state_dict()} == {
        "encoder_priv", "actor", "actor_adapt", "adapt_module", "adapt_ema", "critic",
        *(["normalizer"] if normalize_obs else []),
    }  # fmt: skip
    places = [value.data_ptr() for value in policy.state_dict().values()]
    assert len(places) == len(set(places))
    owned = {id(p) for p in policy.parameters()}
    assert {id(p) for view in (policy.teacher, policy.student) for p in view.parameters()} <= owned
    views = {id(p) for view in (policy.teacher, policy.student) for p in view.parameters()}
    # The module that is averaged is the only network that neither of the two uses.
    assert owned - views == {id(p) for p in policy.adapt_module.parameters()}


def test_the_views_follow_a_policy_that_is_copied_converted_or_loaded() -> None:
    policy, obs = make_policy(), observe(4)
    before = mode(policy.student, obs)
    other = copy.deepcopy(policy)
    for parameter in other.parameters():
        parameter.data.normal_()
    assert torch.equal(mode(policy.student, obs), before)
    assert torch.equal(mode(other.student, obs), mode(other, obs))
    assert not torch.equal(mode(other, obs), before)
    other.load_state_dict(policy.state_dict())
    assert torch.equal(mode(other.student, obs), before)
    assert other.double().teacher.actor.trunk[0].weight.dtype == torch.float64  # type: ignore[union-attr,index]


def test_the_average_starts_as_the_module_and_takes_no_gradient() -> None:
    policy = make_policy()
    for average, module in zip(policy.adapt_ema.parameters(), policy.adapt_module.parameters(), strict=True):
        assert torch.equal(average, module)
        assert average.data_ptr() != module.data_ptr()
        assert (average.requires_grad, module.requires_grad) == (False, True)


# Who sees what


@pytest.mark.parametrize("normalize_obs", [False, True])
def test_the_student_acts_without_the_privileged_group(normalize_obs: bool) -> None:
    policy, obs = make_policy(normalize_obs=normalize_obs), observe(4)
    policy.update_normalizer(observe(100))
    blind = obs.exclude("priv")
    other = obs.clone()
    other["priv"] = other["priv"] + 1.0
    for student in (policy.student, policy):
        assert torch.equal(mode(student, blind), mode(student, obs))
        assert torch.equal(mode(student, other), mode(student, obs))
    assert not torch.equal(mode(policy.teacher, other), mode(policy.teacher, obs))
    assert not torch.equal(policy.get_value(other), policy.get_value(obs))
    with refused(KeyError, "priv"):
        mode(policy.teacher, blind)


def test_a_whole_episode_without_the_privileged_group() -> None:
    env: Any = make_env("payload", 2)
    policy = ROAPolicy.for_env(env, history=24)
    observe_all = env._observe
    env._observe = lambda state: {name: group for name, group in observe_all(state).items() if name != "priv"}
    env.observation_space = gym.spaces.Dict(
        {name: box for name, box in env.observation_space.spaces.items() if name != "priv"}
    )
    batch, _ = rollout(env, make_actor(policy, env.device), {"observation": env.reset(seed=0)}, 200)
    assert sorted(batch["observation"].keys()) == ["command", "object", "policy"]
    assert batch["done"][-1].all()


@pytest.mark.parametrize("group", GROUPS)
def test_every_network_reads_its_groups_and_no_others(group: str) -> None:
    policy, obs = make_policy(), observe(4)
    other = obs.clone()
    other[group] = other[group] + 1.0
    feature = torch.zeros(4, 5)
    reads = {
        "encoder_priv": not torch.equal(policy.encoder_priv(obs), policy.encoder_priv(other)),
        "actor": not torch.equal(policy.actor(obs, feature).mode, policy.actor(other, feature).mode),
        "actor_adapt": not torch.equal(policy.actor_adapt(obs, feature).mode, policy.actor_adapt(other, feature).mode),
        "adapt_module": not torch.equal(policy.adapt_module(obs), policy.adapt_module(other)),
        "adapt_ema": not torch.equal(policy.adapt_ema(obs), policy.adapt_ema(other)),
    }
    expected = {
        "policy": {"actor", "actor_adapt", "adapt_module", "adapt_ema"},
        "command": {"actor", "actor_adapt", "adapt_module", "adapt_ema"},
        "object": {"encoder_priv", "adapt_module", "adapt_ema"},
        "priv": {"encoder_priv"},
    }
    assert {name for name, read in reads.items() if read} == expected[group]


def test_acting_brings_the_latent_along() -> None:
    policy, obs = make_policy(), observe(4)
    teacher, student = (view.act({"observation": obs}) for view in (policy.teacher, policy.student))
    assert torch.equal(teacher["priv_feature"], policy.encoder_priv(obs))
    assert torch.equal(student["priv_pred"], policy.adapt_ema(obs))
    assert sorted(student) == ["action", "priv_pred", "sample_log_prob"]


@pytest.mark.parametrize("view", ["teacher", "student"])
def test_acting_evaluating_and_valuing_agree(view: str) -> None:
    policy, obs = make_policy(normalize_obs=True), observe(3, 4)
    policy.update_normalizer(observe(100))
    acting: Policy = getattr(policy, view)
    action, log_prob, value = acting(obs)
    again, entropy = acting.evaluate_actions(obs, action)
    evaluation = acting.evaluate({"observation": obs, "action": action})
    assert [part.shape for part in (action, log_prob, value, entropy)] == [(3, 4, 2), *[(3, 4, 1)] * 3]
    for ours, theirs in ((again, log_prob), (evaluation.log_prob, log_prob), (evaluation.value, value)):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(acting.get_value(obs), value)
    assert not torch.equal(acting(obs).action, action)
    assert torch.equal(acting(obs, deterministic=True).action, mode(acting, obs))


# History and groups


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_history_reads_steps_and_rollouts_alike(kind: Any) -> None:
    policy, obs = make_policy(history_kind=kind), observe(6, 4)
    whole = policy.adapt_module(obs)
    assert whole.shape == (6, 4, 5)
    torch.testing.assert_close(whole, torch.stack([policy.adapt_module(step) for step in obs]))
    assert mode(policy, obs).shape == (6, 4, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("history", [9, 10, 11, 12, 24])
def test_every_frame_of_the_window_matters(kind: Any, history: int) -> None:
    frames = gym.spaces.Dict({**space().spaces, "policy": gym.spaces.Box(-np.inf, np.inf, (history * FRAME,))})
    policy, obs = make_policy(frames, history=history, history_kind=kind), observe(4)
    obs["policy"] = window = torch.randn(4, history * FRAME, requires_grad=True)
    policy.adapt_module(obs).sum().backward()
    assert window.grad is not None
    assert (window.grad.reshape(4, history, FRAME) != 0).any(-1).all()


def test_frames_may_have_a_dimension_of_their_own() -> None:
    stacked = gym.spaces.Dict({**space().spaces, "policy": gym.spaces.Box(-np.inf, np.inf, (HISTORY, FRAME))})
    for kind in KINDS:
        flat, deep = make_policy(history_kind=kind), make_policy(stacked, history_kind=kind)
        obs = observe(6, 4)
        deep_obs = obs.clone()
        deep_obs["policy"] = obs["policy"].unflatten(-1, (HISTORY, FRAME))
        torch.testing.assert_close(mode(deep, deep_obs), mode(flat, obs))


@pytest.mark.parametrize("left_out", [("command",), ("object",), ("command", "object")])
def test_command_and_object_may_be_missing(left_out: tuple[str, ...]) -> None:
    policy = make_policy(space(*left_out))
    for view in (policy.teacher, policy.student):
        assert [part.shape for part in view(observe(4, left_out=left_out))] == [(4, 2), (4, 1), (4, 1)]


@pytest.mark.parametrize("left_out", ["policy", "priv"])
def test_a_missing_group_is_named(left_out: str) -> None:
    with refused(ConfigError, "'policy'", "'priv'", sorted({*space().spaces} - {left_out})):
        make_policy(space(left_out))


def test_an_observation_without_groups_is_refused() -> None:
    with refused(ConfigError, "Dict", "[]"):
        make_policy(gym.spaces.Box(-1.0, 1.0, (3,)))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"history": 7}, ("policy.history", 7, "'policy'", 30)),
        ({"history": 60}, ("policy.history", 60, "'policy'", 30)),
        ({"history": 0}, ("policy.history", 1, 0)),
        ({"history": 5, "history_kind": "conv"}, ("policy.history", 5, 9)),
        ({"history_kind": "lstm"}, ("policy.history_kind", "['mlp', 'conv', 'gru']", "'lstm'")),
        ({"action_space": gym.spaces.Discrete(3)}, ("continuous", "Discrete(3)")),
    ],
    ids=str,
)
def test_impossible_options_are_refused(options: dict[str, Any], named: tuple[object, ...]) -> None:
    with refused(ConfigError, *named):
        make_policy(**options)


@pytest.mark.parametrize("task", ["payload", "mujoco/WalkerPayload"])
def test_the_history_is_the_number_of_frames_that_the_task_stacks(task: str) -> None:
    env: Any = make_env(task, 1)
    stacked = getattr(env, "task", env).history
    assert ROAPolicy.for_env(env, history=stacked).history == ROAPolicy.for_env(env).history == stacked
    # Half of them divide the window as well, into frames that are none.
    with refused(ConfigError, "policy.history", stacked // 2, stacked):
        ROAPolicy.for_env(env, history=stacked // 2)
    env.close()


@pytest.mark.parametrize("normalize_obs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_student_cannot_see_is_named(kind: Any, normalize_obs: bool) -> None:
    policy = make_policy(history_kind=kind, normalize_obs=normalize_obs)
    for group in ("policy", "command", "object"):
        with refused(KeyError, f"'{group}'", f"[..., {GROUPS[group]}]"):
            mode(policy, observe(4, left_out=(group,)))
        obs = observe(4)
        obs[group] = torch.zeros(4, GROUPS[group] + 1)
        with refused(ValueError, f"'{group}'", f"[..., {GROUPS[group]}]", f"[4, {GROUPS[group] + 1}]"):
            mode(policy, obs)


def test_an_error_that_is_not_about_the_groups_stays_as_it_is() -> None:
    policy = make_policy()
    with refused(RuntimeError, "dtype"):
        mode(policy, observe(4).double())


def test_images_cannot_be_stacked_frames() -> None:
    image = gym.spaces.Dict({**space().spaces, "policy": gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)})
    with refused(ConfigError, "stacked frames", "'policy'"):
        make_policy(image)
