from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tests.point_suite import GOALS, PointSuite
from tests.refusals import refused
from torch import Tensor

from apexrl import PPO, PPOConfig, SyncCollector, make_env
from apexrl.core.errors import ConfigError
from apexrl.policies import ActorCritic
from apexrl.policies.vla import SIZES, VLAPolicy, instruction_tensor
from apexrl.policies.vla.lora import merged, with_adapters
from apexrl.policies.vla.model import Dimensions
from apexrl.policies.vla.towers import TextTower

CHUNK, NUM_ACTIONS = 3, 2
ACTIONS = gym.spaces.Box(-1, 1, (CHUNK * NUM_ACTIONS,), np.float32)
SPACES: dict[str, gym.Space[Any]] = {
    "state": gym.spaces.Box(-1, 1, (4,), np.float32),
    "instruction": gym.spaces.Box(0, 255, (96,), np.uint8),
    "camera": gym.spaces.Box(0, 255, (16, 16, 3), np.uint8),
}
HEADS = ("likelihood", "flow")
TEXTS = ("open the drawer", "close the window slowly")


def space(*groups: str) -> gym.spaces.Dict:
    return gym.spaces.Dict({name: SPACES[name] for name in groups or ("state", "instruction")})


def observe(*leading: int, camera: bool = False) -> TensorDict:
    count = int(np.prod(leading))
    text = torch.stack([instruction_tensor(TEXTS[i % 2]) for i in range(count)])
    obs = {"state": torch.randn(*leading, 4), "instruction": text.reshape(*leading, 96)}
    if camera:
        obs["camera"] = torch.randint(0, 256, (*leading, 16, 16, 3), dtype=torch.uint8)
    return TensorDict(obs, batch_size=list(leading))


def make(head: str = "likelihood", *groups: str, **options: Any) -> VLAPolicy:
    """A policy whose outputs are not all near zero, as they are right after it is made."""
    policy = VLAPolicy(space(*groups), ACTIONS, chunk=CHUNK, head=head, **options)  # type: ignore[arg-type]
    torch.nn.init.normal_(policy.expert.head.weight, std=0.3)
    return policy


def mode(policy: VLAPolicy, obs: TensorDict) -> Tensor:
    """What a policy does without exploring; a flow draws where it starts."""
    torch.manual_seed(0)
    action: Tensor = policy(obs, deterministic=True).action
    return action


def with_statistics(policy: VLAPolicy) -> VLAPolicy:
    policy.set_statistics(
        torch.full((4,), 0.5), torch.full((4,), 2.0), torch.tensor([0.2, -0.3]), torch.tensor([0.5, 0.25])
    )
    return policy


def test_a_text_tower_that_pools_tells_word_order_apart() -> None:
    tower = TextTower(Dimensions(width=32, depth=1, num_heads=1, expert_width=16, pool_text=True, num_buckets=64), 8)
    texts = [instruction_tensor(text) for text in ("left of right", "right of left", "left of right.")]
    tokens, present = tower(torch.stack(texts))
    assert present is None
    assert not torch.allclose(tokens[0], tokens[1])
    torch.testing.assert_close(tokens[0], tokens[2])


@pytest.mark.parametrize(
    ("head", "options"),
    [("likelihood", {}), ("flow", {"noise": "every_step"}), ("flow", {"noise": "last_step"})],
)
@pytest.mark.parametrize("leading", [(5,), (4, 5)])
@pytest.mark.parametrize("pool", [True, False])
def test_a_stored_chunk_gets_its_log_probability_again(
    head: str, options: dict[str, Any], leading: tuple[int, ...], pool: bool
) -> None:
    policy = with_statistics(make(head, "state", "instruction", "camera", pool_text=pool, **options))
    obs = observe(*leading, camera=True)
    with torch.no_grad():
        output = policy.act({"observation": obs})
    assert output["action"].shape == (*leading, CHUNK * NUM_ACTIONS)
    assert set(output) == {"action", "sample_log_prob", *policy.extra_keys}
    evaluation = policy.evaluate(TensorDict({"observation": obs, **output}, batch_size=list(leading)))
    # A sum of many terms of both signs: its rounding is that of the terms.
    torch.testing.assert_close(evaluation.log_prob, output["sample_log_prob"], rtol=1e-5, atol=1e-4)
    assert evaluation.log_prob.shape == evaluation.entropy.shape == evaluation.value.shape == (*leading, 1)
    # A minibatch of other size and order gives the same numbers.
    flat = {name: value.flatten(0, len(leading) - 1)[1:3] for name, value in output.items()}
    some = policy.evaluate({"observation": obs.reshape(-1)[1:3], **flat})
    expected = output["sample_log_prob"].reshape(-1, 1)[1:3]
    torch.testing.assert_close(some.log_prob, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("head", HEADS)
def test_it_answers_as_an_actor_critic_does(head: str) -> None:
    policy, peer = make(head), ActorCritic(space(), ACTIONS)
    obs = observe(2, 3)
    for one, other in zip(policy(obs), peer(obs), strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
    assert policy.get_value(obs).shape == peer.get_value(obs).shape
    assert torch.equal(mode(policy, obs), mode(policy, obs))
    assert not torch.equal(policy(obs).action, policy(obs).action)
    stored = policy.act({"observation": obs})
    key = "denoising" if head == "flow" else "action"
    ours, theirs = policy.evaluate_actions(obs, stored[key]), peer.evaluate_actions(obs, stored["action"])
    assert [tensor.shape for tensor in ours] == [tensor.shape for tensor in theirs]


@pytest.mark.parametrize("head", HEADS)
def test_a_value_head_values_the_state(head: str) -> None:
    policy = make(head, value_head=True)
    assert policy.has_value
    obs = observe(3, 2)
    value = policy.get_value(obs)
    assert value.shape == (3, 2, 1)
    assert len(value.unique()) == 6
    output = policy.act({"observation": obs})
    assert torch.equal(policy.evaluate({"observation": obs, **output}).value, value)
    assert torch.equal(policy(obs).value, value)
    value.sum().backward()
    assert policy.critic is not None
    for part in (policy.critic, policy.prefix):
        assert all(parameter.grad is not None for parameter in part.parameters())
    # Bytes behind the words of an instruction are no part of the mean.
    alone = policy.get_value(obs[1:2])
    torch.testing.assert_close(alone, value[1:2], rtol=1e-4, atol=1e-5)
    without = make(head)
    assert not without.has_value
    assert not without.get_value(obs).any()


@pytest.mark.parametrize("head", HEADS)
def test_ppo_trains_both_heads_and_learns_the_value(head: str) -> None:
    env = make_env("pendulum", 4)
    torch.manual_seed(0)
    policy = VLAPolicy.for_env(env, head=head, width=32, depth=1, num_heads=2, value_head=True)
    algorithm = PPO(policy=policy, cfg=PPOConfig(num_epochs=1, num_minibatches=1, learning_rate=3e-3, gamma=0.0))
    rollout = SyncCollector(env, policy, keep=PPO.required_keys, seed=0).collect(16)
    metrics = [algorithm.update(rollout) for _ in range(30)]
    assert metrics[0]["approx_kl"].item() < 1e-6  # the stored chunk, or path, has the probability it had
    # With a discount of 0 the value is the next reward, whose variance the mean alone leaves.
    assert metrics[-1]["value_loss"] < 0.5 * rollout["reward"].var()


def test_ppo_refuses_a_policy_that_values_nothing() -> None:
    with refused(ConfigError, "VLAPolicy", "value_head=True"):
        PPO(policy=VLAPolicy.for_env(make_env("pendulum", 2), width=32, depth=1, num_heads=2))


def test_a_flow_policy_names_what_it_needs_to_evaluate() -> None:
    policy, obs = make("flow"), observe(4)
    with refused(ValueError, "batch['denoising']"):
        policy.evaluate_actions(obs, policy(obs).action)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("group", ["state", "instruction", "camera"])
def test_every_group_changes_the_action(head: str, group: str) -> None:
    policy = make(head, "state", "instruction", "camera", patch_size=4)
    obs = observe(2, camera=True)
    other = obs.clone()
    other[group] = observe(3, camera=True)[1:][group]
    before, after = (mode(policy, each) for each in (obs, other))
    assert not torch.allclose(before, after, atol=1e-6)


def test_a_plain_box_is_a_state() -> None:
    policy = VLAPolicy(SPACES["state"], ACTIONS, chunk=CHUNK)
    assert policy(torch.randn(2, 5, 4)).action.shape == (2, 5, 6)
    assert policy.get_value(torch.randn(2, 5, 4)).shape == (2, 5, 1)


def test_padding_behind_an_instruction_has_no_effect() -> None:
    # With one token a word, the missing words are masked: more room for words changes nothing.
    policy = make(pool_text=False, max_words=4)
    wide = make(pool_text=False, max_words=9)
    state = policy.state_dict()
    state["text_tower.places"] = torch.cat((state["text_tower.places"], torch.randn(5, 128)))
    wide.load_state_dict(state)
    obs = observe(4)
    torch.testing.assert_close(wide(obs, deterministic=True).action, policy(obs, deterministic=True).action)


def test_actions_are_normalised_in_one_place() -> None:
    plain, scaled = make(), make()
    scaled.load_state_dict(plain.state_dict())
    scaled.set_statistics(torch.zeros(4), torch.ones(4), torch.tensor([0.2, -0.3]), torch.tensor([0.5, 0.25]))
    obs = observe(4)
    mean, std = torch.tensor([0.2, -0.3] * CHUNK), torch.tensor([0.5, 0.25] * CHUNK)
    plain_mode = plain(obs, deterministic=True)
    scaled_mode = scaled(obs, deterministic=True)
    torch.testing.assert_close(scaled_mode.action, plain_mode.action * std + mean)
    # The density is that of the normalised chunk, so the scale does not enter it.
    torch.testing.assert_close(scaled_mode.log_prob, plain_mode.log_prob)


def test_statistics_of_another_suite_are_refused() -> None:
    one = torch.ones(4)
    with refused(ConfigError, "state_mean", 4, 3):
        make().set_statistics(one[:3], one, one[:2], one[:2])
    with refused(ConfigError, "action_std"):
        make().set_statistics(one, one, one[:2], one[:2] * torch.nan)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("rank", [0, 2])
def test_the_state_dict_goes_round(head: str, rank: int) -> None:
    policy = with_statistics(make(head, "state", "instruction", "camera", lora_rank=rank))
    other = make(head, "state", "instruction", "camera", lora_rank=rank)
    other.load_state_dict(policy.state_dict())
    obs = observe(3, camera=True)
    assert torch.equal(mode(policy, obs), mode(other, obs))


def gradients(policy: VLAPolicy, loss: Tensor) -> set[str]:
    """The parts whose parameters got a gradient that is not zero."""
    policy.zero_grad()
    loss.backward()
    return {
        name
        for name, parameter in policy.named_parameters()
        if parameter.grad is not None and parameter.grad.abs().sum() > 0
    }


def losses(policy: VLAPolicy) -> list[Tensor]:
    obs = observe(8, camera=True)
    with torch.no_grad():
        batch = {"observation": obs, **policy.act({"observation": obs})}
    return [policy.evaluate(batch).log_prob.sum(), policy.imitation_loss(batch).sum()]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", [0, 1])
def test_gradients_reach_every_parameter(head: str, kind: int) -> None:
    options = {"condition_dropout": 0.5} if head == "flow" else {}
    policy = make(head, "state", "instruction", "camera", **options)
    reached = gradients(policy, losses(policy)[kind])
    missing = {name for name, _ in policy.named_parameters()} - reached
    # Imitation leaves the scale alone; a policy gradient of a flow samples from its conditional branch.
    assert missing == ({"likelihood.log_std"} if head == "likelihood" and kind == 1 else set())


@pytest.mark.parametrize("head", HEADS)
def test_frozen_towers_get_no_gradient(head: str) -> None:
    policy = make(head, "state", "instruction", "camera", freeze=("vision", "text"))
    reached = gradients(policy, losses(policy)[0])
    assert not any(name.startswith(("vision_towers", "text_tower")) for name in reached)
    assert {name.split(".")[0] for name in reached} >= {"state_tower", "prefix", "expert"}


def test_lora_trains_the_additions_and_not_the_transformers() -> None:
    policy = make(lora_rank=2)
    for name, parameter in policy.named_parameters():
        if name.endswith("lora_b"):  # at zero, A would get no gradient yet
            torch.nn.init.normal_(parameter, std=0.02)
    obs = observe(8)
    with torch.no_grad():
        stored = policy.act({"observation": obs})
    reached = gradients(policy, policy.evaluate({"observation": obs, **stored}).log_prob.sum())
    inside = {name for name in reached if name.startswith(("prefix", "expert.layers"))}
    assert inside
    assert all(name.endswith(("lora_a", "lora_b")) for name in inside)
    adapters = {name for name, _ in policy.named_parameters() if name.endswith(("lora_a", "lora_b"))}
    assert adapters == inside


def test_adapters_start_from_a_whole_policy_and_fold_into_one() -> None:
    torch.manual_seed(0)
    whole, adapted = make(), make(lora_rank=2)
    obs = observe(4)
    adapted.load_state_dict(with_adapters(adapted, whole.state_dict()))
    expected = whole(obs, deterministic=True).action
    torch.testing.assert_close(adapted(obs, deterministic=True).action, expected)
    for name, parameter in adapted.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter, std=0.1)
    trained = adapted(obs, deterministic=True).action
    assert not torch.allclose(trained, expected, atol=1e-3)
    whole.load_state_dict(merged(adapted))
    torch.testing.assert_close(whole(obs, deterministic=True).action, trained, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"size": "tinny"}, ("policy.size", "'tinny'", "Did you mean 'tiny'")),
        ({"head": "diffusion"}, ("policy.head", "likelihood", "flow", "'diffusion'")),
        ({"chunk": 4}, ("policy.chunk", 6, 4)),
        ({"num_heads": 5}, ("policy.num_heads", "policy.width", 128, 5)),
        ({"freeze": ("vison",)}, ("policy.freeze", "'vison'", "Did you mean 'vision'")),
        ({"init_std": 5.0}, ("policy.init_std", "policy.min_std", 5.0)),
        ({"distribution": "cauchy"}, ("policy.distribution", "gaussian", "laplace", "'cauchy'")),
        ({"head": "flow", "noise_level": 0.0}, ("policy.noise_level", 0.0)),
        ({"head": "flow", "noise": "all"}, ("policy.noise", "every_step", "last_step", "'all'")),
        ({"head": "flow", "denoising_steps": 0}, ("policy.denoising_steps", 1, 0)),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], named: tuple[object, ...]) -> None:
    with refused(ConfigError, *named):
        VLAPolicy(space(), ACTIONS, **{"chunk": CHUNK, **options})


@pytest.mark.parametrize(("name", "low", "high"), [("tiny", 0.5, 1.5), ("small", 10, 20), ("base", 90, 120)])
def test_sizes_are_what_they_are_called(name: str, low: float, high: float) -> None:
    with torch.device("meta"):
        policy = VLAPolicy(space("state", "instruction", "camera"), ACTIONS, chunk=CHUNK, size=name, head="flow")
    millions = sum(parameter.numel() for parameter in policy.parameters()) / 1e6
    assert low <= millions <= high
    assert policy.dimensions == SIZES[name]


def demonstrations(suite: PointSuite, count: int) -> dict[str, Any]:
    """States anywhere, and what the suite's expert does from them for a whole chunk; the tasks disagree."""
    draw = np.random.default_rng(0)
    states, texts, actions = [], [], []
    for i in range(count):
        task = i % suite.num_tasks
        simulator = suite.make_simulator(task)
        simulator.restore(np.array([*draw.uniform(-0.9, 0.9, 2), 0.0]))
        states.append(torch.from_numpy(simulator.observe()["state"]))
        texts.append(instruction_tensor(suite.instructions[task]))
        chunk = []
        for _ in range(CHUNK):
            chunk.append(simulator.expert_action())
            simulator.advance(chunk[-1])
        actions.append(torch.from_numpy(np.concatenate(chunk)))
    obs = TensorDict({"state": torch.stack(states), "instruction": torch.stack(texts)}, batch_size=[count])
    return {"observation": obs, "action": torch.stack(actions)}


@pytest.mark.parametrize(
    ("head", "options"), [("likelihood", {}), ("likelihood", {"distribution": "laplace"}), ("flow", {})]
)
def test_imitation_learns_what_state_and_instruction_ask_for(head: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    suite = PointSuite(num_tasks=len(GOALS))
    spaces = gym.spaces.Dict({**suite.observation_space.spaces, "instruction": SPACES["instruction"]})
    policy = VLAPolicy(spaces, ACTIONS, chunk=CHUNK, head=head, **options)
    batch, held_out = demonstrations(suite, 512), demonstrations(suite, 600)
    held_out = {name: value[512:] for name, value in held_out.items()}
    state, action = batch["observation"]["state"], batch["action"]
    policy.set_statistics(state.mean(0), state.std(0), action.mean(0), action.std(0))
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    for _ in range(150):
        rows = torch.randint(0, 512, (128,))
        optimizer.zero_grad()
        policy.imitation_loss({"observation": batch["observation"][rows], "action": action[rows]}).mean().backward()
        optimizer.step()
    with torch.no_grad():
        predicted = policy(held_out["observation"], deterministic=True).action
    error = (predicted - held_out["action"]).square().mean()
    spread = (held_out["action"] - held_out["action"].mean(0)).square().mean()
    assert error < 0.1 * spread, f"explains {1 - error / spread:.3f} of the variance"
