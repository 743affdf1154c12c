"""Each option of RLOO has a test that fails when the option is ignored."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tests.refusals import refused
from tests.scripted import flat_gradient
from torch import Tensor

from apexrl.algorithms.collapse import CollapseGuard
from apexrl.algorithms.rloo import RLOO, RLOO_METRICS, RLOOConfig
from apexrl.core.errors import ConfigError, DivergenceError
from apexrl.core.functional.rloo import leave_one_out
from apexrl.core.system.acceleration import Acceleration
from apexrl.core.types import Evaluation
from apexrl.policies import ActorCritic, Policy
from apexrl.policies.vla import PI0_CFG_Adapter, VLAPolicy

CHUNK = 4
OBSERVATION_SPACE = gym.spaces.Dict({"state": gym.spaces.Box(-1, 1, (2,), np.float32)})
ACTION_SPACE = gym.spaces.Box(-1, 1, (CHUNK,), np.float32)


def make_policy(seed: int = 0, **options: Any) -> ActorCritic:
    torch.manual_seed(seed)
    return ActorCritic(OBSERVATION_SPACE, ACTION_SPACE, actor_cfg={"init_std": 0.5, **options})


def reaches(state: Tensor, action: Tensor) -> Tensor:
    """The group bandit: the mean of a chunk must be near a linear function of the state."""
    target = 0.5 * state[..., :1] - 0.4 * state[..., 1:]
    return (action.mean(-1, keepdim=True) - target).abs() < 0.15


@torch.no_grad()
def sample(policy: Policy, num_groups: int = 12, size: int = 8, length: int = 3) -> TensorDict:
    """Groups of episodes from the same states; an episode ends at its first success."""
    count = num_groups * size
    state = (torch.rand(length, num_groups, 2) * 2 - 1).repeat_interleave(size, dim=1)
    obs = TensorDict({"state": state}, batch_size=[length, count])
    out = policy.act({"observation": obs})
    success = reaches(state, out["action"])
    before = torch.cat((torch.zeros_like(success[:1]), success.cummax(0).values[:-1]))
    valid = ~before
    return TensorDict(
        {
            "observation": obs,
            **out,
            "reward": (success & valid).float(),
            "terminated": success & valid,
            "valid": valid,
            "group": torch.arange(num_groups).repeat_interleave(size).expand(length, -1).unsqueeze(-1).clone(),
            "metric": TensorDict({"success": (success & valid).float()}, batch_size=[length, count]),
        },
        batch_size=[length, count],
    )


def setup(seed: int = 0, **options: Any) -> tuple[RLOO, TensorDict]:
    policy = make_policy(seed)
    algorithm = RLOO(policy=policy, cfg=RLOOConfig(**options))
    torch.manual_seed(seed + 1)
    return algorithm, sample(policy)


def weights(algorithm: RLOO) -> Tensor:
    return torch.cat([p.detach().flatten() for p in algorithm.policy.parameters()]).clone()


def updated(**options: Any) -> Tensor:
    algorithm, batch = setup(**options)
    torch.manual_seed(2)
    algorithm.update(batch)
    return weights(algorithm)


def advantages(batch: TensorDict) -> Tensor:
    """The leave-one-out score of every episode ``[E]``."""
    returns = torch.where(batch["valid"], batch["reward"], 0.0).sum(0).squeeze(-1)
    return leave_one_out(returns, batch["group"][0].squeeze(-1))


def gradients(algorithm: RLOO) -> dict[str, Tensor]:
    """That of the last optimizer step, by the name of the parameter."""
    return algorithm.optimizer.views(algorithm.optimizer.gradient)


ONE_STEP: dict[str, Any] = {"num_epochs": 1, "num_minibatches": 1, "max_grad_norm": 1e9}


@pytest.mark.parametrize(
    ("options", "scores"),
    [
        ({}, [0.5, -1.0, 0.5, 1.0, -1.0]),
        ({"baseline": "batch"}, [0.75, -0.5, 0.75, -0.5, -0.5]),
        ({"normalize_advantage": "group"}, [0.5 * 3**0.5, -(3**0.5), 0.5 * 3**0.5, 2**0.5, -(2**0.5)]),
        ({"normalize_advantage": "batch"}, [score / 0.875**0.5 for score in (0.5, -1.0, 0.5, 1.0, -1.0)]),
    ],
)
def test_the_gradient_is_that_of_the_log_probability_times_the_advantage_of_the_episode(
    options: dict[str, Any], scores: list[float]
) -> None:
    # Returns are 1 0 1 in group 4 and 1 0 in group 9: 1 against 1/2, 0 against 1, then 1 against 0. Their standard
    # deviations are 1/√3 and 1/√2. Against all others the second group gets 0 0: 1 against 1/4, 0 against 2/4. The
    # squares of the first scores sum to 3.5, so their variance is 3.5/4.
    policy = make_policy()
    algorithm = RLOO(policy=policy, cfg=RLOOConfig(**ONE_STEP, **options))
    batch = sample(policy, num_groups=1, size=5, length=2)
    batch["group"] = torch.tensor([4, 4, 4, 9, 9]).expand(2, -1).unsqueeze(-1).clone()
    batch["valid"] = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 1]], dtype=torch.bool).unsqueeze(-1)
    batch["reward"] = torch.tensor([[1.0, 0, 0, 1, 0], [9, 0, 1, 9, 0]]).unsqueeze(-1)
    if options.get("baseline") == "batch":
        batch["reward"][0, 3] = 0.0
    algorithm.update(batch)
    valid = batch["valid"].squeeze(-1)
    fresh = RLOO(policy=make_policy(), cfg=RLOOConfig())
    log_prob, _ = fresh.policy.evaluate_actions(batch["observation"][valid], batch["action"][valid])
    advantage = torch.tensor(scores).expand(2, -1)[valid].unsqueeze(-1)
    expected = flat_gradient(fresh.optimizer, -(advantage * log_prob).mean())
    torch.testing.assert_close(algorithm.optimizer.gradient, expected, rtol=1e-4, atol=1e-6)


def test_padding_is_never_read() -> None:
    def run(poison: bool) -> Tensor:
        algorithm, batch = setup()
        padding = ~batch["valid"].squeeze(-1)
        assert padding.sum() > 10
        if poison:
            for key in ("action", "sample_log_prob", "reward"):
                batch[key][padding] = torch.nan
            batch["observation"]["state"][padding] = torch.nan
        torch.manual_seed(2)
        algorithm.update(batch)
        return weights(algorithm)

    assert torch.equal(run(poison=True), run(poison=False))


def test_a_list_of_episodes_teaches_what_their_batch_does() -> None:
    learned = []
    for as_list in (False, True):
        algorithm, batch = setup()
        lengths = batch["valid"].sum(0).flatten().tolist()
        episodes = [
            {**dict(batch[:length, column].items()), "group": int(batch["group"][0, column]), "success": True}
            for column, length in enumerate(lengths)
        ]
        assert len(set(lengths)) > 1
        torch.manual_seed(2)
        metrics = algorithm.update(episodes if as_list else batch)
        assert metrics["updates"] > 0
        learned.append(weights(algorithm))
    assert torch.equal(*learned)
    with refused(KeyError, "RLOO.update", "sample_log_prob"):
        algorithm.update([{name: value for name, value in episodes[0].items() if name != "sample_log_prob"}])


def test_the_ratio_is_one_in_the_first_minibatch() -> None:
    algorithm, batch = setup(**ONE_STEP)
    metrics = algorithm.update(batch)
    assert metrics["approx_kl"].item() < 1e-9
    assert metrics["clip_frac"].item() == 0.0


def test_the_clipped_ratio_is_that_of_the_whole_chunk() -> None:
    # Each of the four numbers became 1.1 times as likely: the chunk 1.46 times, outside a clip of 0.3.
    algorithm, batch = setup(**ONE_STEP, clip_coef=0.3)
    batch["sample_log_prob"] -= CHUNK * float(np.log(1.1))
    assert algorithm.update(batch)["clip_frac"].item() == 1.0


def test_the_upper_side_of_the_clip_can_differ() -> None:
    algorithm, batch = setup(**ONE_STEP, clip_coef=0.3, clip_coef_high=0.5)
    batch["sample_log_prob"] -= CHUNK * float(np.log(1.1))
    assert algorithm.update(batch)["clip_frac"].item() == 0.0


@pytest.mark.parametrize("options", [{}, {"entropy_coef": 0.1, "kl_coef": 0.5, "clip_coef": 0.05}])
def test_micro_batches_add_up_to_the_gradient_of_the_minibatch(options: dict[str, Any]) -> None:
    algorithms = []
    for size in (None, 7):
        algorithm, batch = setup(**ONE_STEP, micro_batch_size=size, **options)
        with torch.no_grad():  # away from ratio 1 and from the starting policy
            algorithm.optimizer.flat.add_(0.02)
        torch.manual_seed(2)
        metrics = algorithm.update(batch)
        algorithms.append((algorithm, metrics))
    (one, told), (several, told_too) = algorithms
    torch.testing.assert_close(several.optimizer.gradient, one.optimizer.gradient, rtol=1e-4, atol=1e-6)
    assert one.optimizer.gradient.norm() > 0.01
    for name, value in told.items():
        torch.testing.assert_close(told_too[name], value, rtol=1e-4, atol=1e-6)


def test_the_critic_and_the_statistics_of_observations_stay_as_they_are() -> None:
    torch.manual_seed(0)
    policy = ActorCritic(OBSERVATION_SPACE, ACTION_SPACE, normalize_obs=True)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    RLOO(policy=policy).update(sample(policy))
    changed = {
        name.split(".")[0] for name, value in policy.state_dict().items() if not torch.equal(value, before[name])
    }
    assert changed == {"actor"}


@pytest.mark.parametrize(
    "options",
    [
        {"baseline": "batch"},
        {"normalize_advantage": "group"},
        {"normalize_advantage": "batch"},
        {"num_epochs": 2},
        {"num_minibatches": 9},
        {"minibatch_size": 16},
        {"learning_rate": 1e-3},
        {"clip_coef": 0.01},
        {"clip_coef_high": 0.01},
        {"target_kl": 1e-6},
        {"entropy_coef": 0.5},
        {"kl_coef": 0.5},
        {"max_grad_norm": 1e-8},
        {"adam_eps": 1.0},
        {"warmup_steps": 50},
    ],
    ids=str,
)
def test_an_option_changes_what_is_learned(options: dict[str, Any]) -> None:
    assert not torch.equal(updated(**options), updated())


def test_minibatches_are_at_most_as_large_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, batch = setup(minibatch_size=16, num_epochs=1)
    sizes: list[int] = []
    monkeypatch.setattr(algorithm, "gradient_step", lambda minibatch, weight: sizes.append(len(minibatch["action"])))
    algorithm.update(batch)
    assert sum(sizes) == int(batch["valid"].sum())
    assert max(sizes) <= 16
    assert max(sizes) - min(sizes) <= 1


def test_the_linear_schedule_falls_to_zero() -> None:
    algorithm, batch = setup(schedule="linear", learning_rate=1e-3)
    algorithm.adjust_learning_rate(0.75)
    assert algorithm.update(batch)["learning_rate"].item() == pytest.approx(2.5e-4)


def test_the_linear_schedule_survives_resume() -> None:
    options: dict[str, Any] = {"schedule": "linear", "learning_rate": 1e-3, "warmup_steps": 10}
    algorithm, batch = setup(**options)
    algorithm.adjust_learning_rate(0.9)
    other, _ = setup(**options)
    other.load_state_dict(algorithm.state_dict())
    assert other.update(batch)["learning_rate"].item() == pytest.approx(1e-4)


def test_warm_up_counts_the_steps_that_were_taken() -> None:
    # The first minibatch is taken at ratio 1; the next ones exceed the limit and are skipped.
    algorithm, batch = setup(learning_rate=1e-3, warmup_steps=20, target_kl=1e-9)
    for _ in range(3):
        metrics = algorithm.update(batch)
        assert metrics["updates"].item() == 1.0
        batch = sample(algorithm.policy)
    # After three steps of 20 the fourth is due.
    assert metrics["learning_rate"].item() == pytest.approx(4 / 20 * 1e-3)


def test_equal_returns_take_no_step() -> None:
    algorithm, batch = setup()
    batch["reward"] = torch.where(batch["valid"], 0.0, 9.0)
    batch["reward"][0] = 0.7
    before = weights(algorithm)
    metrics = algorithm.update(batch)
    assert metrics["updates"].item() == metrics["mixed"].item() == 0.0
    assert torch.equal(weights(algorithm), before)


def test_the_step_size_rises_over_the_first_steps_and_over_those_after_a_collapse() -> None:
    algorithm, batch = setup(num_epochs=1, num_minibatches=4, warmup_steps=10, collapse_ratio=0.5, learning_rate=1e-3)
    rates = [algorithm.update(batch)["learning_rate"].item() for _ in range(3)]
    assert rates == pytest.approx([4e-4, 8e-4, 1e-3])
    other, _ = setup(num_epochs=1, num_minibatches=4, warmup_steps=10, collapse_ratio=0.5, learning_rate=1e-3)
    other.update(batch)
    other.load_state_dict(algorithm.state_dict())
    assert other.update(batch)["learning_rate"].item() == pytest.approx(1e-3)
    failed = batch.clone()
    failed["reward"].zero_()
    failed["metric", "success"].zero_()
    assert algorithm.update(failed)["collapsed"].item() == 1.0
    assert algorithm.update(batch)["learning_rate"].item() == pytest.approx(4e-4)


def test_the_divergence_from_the_start_is_measured_and_held_down() -> None:
    def divergence(kl_coef: float) -> float:
        algorithm, batch = setup(kl_coef=kl_coef, num_epochs=8, learning_rate=1e-3, clip_coef=0.9)
        algorithm.update(batch)
        return algorithm.update(batch)["start_kl"].item()

    assert 0 < divergence(5.0) < 0.2 * divergence(1e-6)


def test_a_loaded_state_goes_on_bit_for_bit_also_from_the_same_start() -> None:
    options: dict[str, Any] = {"kl_coef": 0.3, "collapse_ratio": 0.3}
    algorithm, batch = setup(**options)
    algorithm.update(batch)
    torch.manual_seed(5)
    second = sample(algorithm.policy)
    other = RLOO(policy=make_policy(seed=3), cfg=RLOOConfig(**options))
    other.policy.load_state_dict(algorithm.policy.state_dict())
    other.load_state_dict(algorithm.state_dict())
    results = []
    for each in (algorithm, other):
        torch.manual_seed(6)
        metrics = each.update(second)
        assert metrics["start_kl"].item() > 1e-4
        results.append(weights(each))
    assert torch.equal(*results)
    assert other.guard is not None
    assert algorithm.guard is not None
    assert torch.equal(other.guard.weights, algorithm.guard.weights)
    assert other.guard.best == algorithm.guard.best > 0


def test_a_state_dict_is_a_copy_of_plain_values(tmp_path: Any) -> None:
    algorithm, batch = setup(kl_coef=0.3, collapse_ratio=0.3)
    state = algorithm.state_dict()
    kept = state["optimizer"]["state"]["mean"].clone()
    algorithm.update(batch)
    assert torch.equal(state["optimizer"]["state"]["mean"], kept)
    torch.save(state, tmp_path / "state.pt")
    torch.load(tmp_path / "state.pt", weights_only=True)


def test_what_is_not_finite_changes_nothing_and_is_reported() -> None:
    algorithm, batch = setup()
    before = weights(algorithm)
    place = batch["valid"].squeeze(-1).nonzero()[5].tolist()
    batch["sample_log_prob"][place[0], place[1]] = torch.nan
    metrics = algorithm.update(batch)
    # Minibatches without the bad chunk may have come first.
    assert metrics["nonfinite"].item() == 1.0
    assert weights(algorithm).isfinite().all()
    with refused(DivergenceError, "'sample_log_prob'"):
        algorithm.raise_diverged(batch)
    algorithm, batch = setup(num_minibatches=1)
    batch["sample_log_prob"][place[0], place[1]] = torch.nan
    algorithm.update(batch)
    assert torch.equal(weights(algorithm), before)


def test_a_batch_without_a_mixed_group_does_not_follow_the_old_momentum() -> None:
    algorithm, batch = setup()
    algorithm.update(batch)
    before = weights(algorithm)
    batch["reward"].zero_()
    metrics = algorithm.update(batch)
    assert torch.equal(weights(algorithm), before)
    assert metrics["mixed"].item() == 0.0
    assert metrics["nonfinite"].item() == 0.0
    assert metrics["loss"].isnan()


def test_what_the_actor_stored_goes_to_the_evaluation_of_the_policy() -> None:
    class Noisy(ActorCritic):
        extra_keys = ("denoising",)

        def evaluate(self, batch: Mapping[str, Any] | TensorDict) -> Evaluation:
            assert batch["denoising"].shape[1:] == (3, CHUNK)
            seen.append(batch["denoising"])
            return super().evaluate(batch)

    seen: list[Tensor] = []
    torch.manual_seed(0)
    policy = Noisy(OBSERVATION_SPACE, ACTION_SPACE)
    batch = sample(policy)
    batch["denoising"] = torch.randn(*batch.shape, 3, CHUNK)
    algorithm = RLOO(policy=policy, cfg=RLOOConfig(**ONE_STEP))
    algorithm.update(batch)
    assert len(seen) == 1
    assert len(seen[0]) == int(batch["valid"].sum())
    with refused(KeyError, "RLOO.update", "denoising"):
        algorithm.update(batch.exclude("denoising"))


def make_vla(head: Literal["likelihood", "flow"]) -> VLAPolicy:
    torch.manual_seed(0)
    return VLAPolicy(OBSERVATION_SPACE, ACTION_SPACE, chunk=2, head=head, width=32, depth=1, num_heads=2)


@pytest.mark.parametrize("head", ["likelihood", "flow"])
def test_what_did_better_becomes_likelier_for_both_heads_of_a_vla(head: Literal["likelihood", "flow"]) -> None:
    policy = make_vla(head)
    batch = sample(policy)
    first = RLOO(policy=policy, cfg=RLOOConfig(**ONE_STEP, learning_rate=1e-9)).update(batch)
    assert first["approx_kl"].item() < 1e-6
    algorithm = RLOO(policy=policy, cfg=RLOOConfig(num_minibatches=1, num_epochs=3))
    algorithm.update(batch)
    change = policy.evaluate(batch).log_prob.detach() - batch["sample_log_prob"]
    score = torch.where(batch["valid"], change * advantages(batch).unsqueeze(-1), 0.0).sum() / batch["valid"].sum()
    assert score.item() > 0.003


@pytest.mark.parametrize(("head", "options"), [("likelihood", {}), ("flow", {"noise": "last_step"})])
def test_actions_of_a_chunk_that_were_never_executed_do_not_count(head: Any, options: dict[str, Any]) -> None:
    def run(tail: float) -> tuple[dict[str, Tensor], Tensor]:
        torch.manual_seed(0)
        policy = VLAPolicy(
            OBSERVATION_SPACE, ACTION_SPACE, chunk=2, head=head, width=32, depth=1, num_heads=2, **options
        )
        algorithm = RLOO(policy=policy, cfg=RLOOConfig(**ONE_STEP))
        batch = sample(policy)
        # Every chunk ended after the first of its two actions; what the second would have been is moved.
        batch["info", "control_steps"] = torch.ones_like(batch["reward"], dtype=torch.int64)
        batch["action"][..., 2:] += tail
        if head == "flow":
            batch["denoising"][..., -1, 2:] += tail
        return algorithm.update(batch), algorithm.optimizer.gradient

    (metrics, gradient), (_, moved) = run(0.0), run(3.0)
    assert metrics["approx_kl"].item() < 1e-9
    assert gradient.norm() > 1e-3
    torch.testing.assert_close(moved, gradient)


def test_executed_actions_count_in_the_ratio_of_a_chunk() -> None:
    policy = make_vla("likelihood")
    batch = sample(policy)
    steps = torch.randint(1, 3, batch["reward"].shape)
    flat = batch.reshape(-1)
    mean = policy(flat["observation"], deterministic=True).action
    z = ((flat["action"] - mean) / 0.6).square()
    cut = (steps == 1).reshape(-1)
    executed = torch.where(cut, z[:, :2].sum(-1), z.sum(-1))
    numbers = torch.where(cut, 2, 4)
    expected = -0.5 * executed - numbers * (math.log(0.6) + 0.5 * math.log(2 * math.pi))
    found = policy.evaluate({**dict(flat.items()), "valid_steps": steps.reshape(-1, 1)}).log_prob
    torch.testing.assert_close(found.squeeze(-1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head", ["likelihood", "flow"])
def test_samples_of_older_weights_begin_at_ratio_one_and_count_by_the_change_since(head: Any) -> None:
    policy = make_vla(head)
    batch = sample(policy)
    batch["info", "control_steps"] = torch.randint(1, 3, batch["reward"].shape)
    batch["policy_version"] = torch.zeros_like(batch["group"])
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    algorithm = RLOO(policy=policy, cfg=RLOOConfig(**ONE_STEP, target_kl=0.01))
    rows = batch["valid"].squeeze(-1).nonzero(as_tuple=True)
    samples = {**dict(batch[rows].items()), "valid_steps": batch["info", "control_steps"][rows]}
    whole = {name: value for name, value in samples.items() if name != "valid_steps"}
    # What acted stored the probability of whole chunks, also of those that were cut.
    ratio = (policy.evaluate(whole).log_prob.detach() - samples["sample_log_prob"]).exp()
    assert ratio.min() < 0.95
    assert ratio[samples["valid_steps"] < 2].min() < 0.95
    weighted = advantages(batch)[rows[1]].unsqueeze(-1) * ratio.clamp(max=2.0)
    # Where the ratio is 1 the loss has the gradient of -mean(A log π) over the actions that were executed.
    expected = flat_gradient(algorithm.optimizer, -(weighted * policy.evaluate(samples).log_prob).mean())
    metrics = algorithm.update(batch)
    assert metrics["updates"].item() == 1
    assert metrics["approx_kl"].item() < 1e-6
    torch.testing.assert_close(algorithm.optimizer.gradient, expected, rtol=1e-3, atol=1e-5)


class Returning(ActorCritic):
    """Where its update begins it is far from what it did before; in the minibatches it is back."""

    distance = 400.0

    def evaluate_actions(self, obs: Any, action: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, entropy = super().evaluate_actions(obs, action)
        return log_prob - (0.0 if self.training else self.distance), entropy


def test_stale_samples_that_the_policy_left_and_comes_back_to_do_not_diverge() -> None:
    # At the start of the update their weight exp(-400) is 0; one step later their ratio exceeds float32: 0 · ∞.
    torch.manual_seed(0)
    policy = Returning(OBSERVATION_SPACE, ACTION_SPACE).eval()
    algorithm = RLOO(policy=policy, cfg=RLOOConfig(**ONE_STEP, kl_coef=0.1))
    reference: Any = algorithm.reference
    reference.distance = 0.0
    batch = sample(policy)
    batch["policy_version"] = torch.zeros_like(batch["group"])
    metrics = algorithm.update(batch)
    assert metrics["updates"].item() == 1.0
    assert metrics["policy_loss"].item() == 0.0
    assert metrics["approx_kl"].item() > 1e6
    assert metrics["nonfinite"].item() == 0.0
    assert all(metrics[name].isfinite() for name in RLOO_METRICS)
    assert weights(algorithm).isfinite().all()


def test_the_weighted_flow_learns_what_did_better(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_vla("flow")
    cfg = RLOOConfig(loss="weighted_flow", num_epochs=20, num_minibatches=1, learning_rate=3e-3)
    algorithm = RLOO(policy=policy, cfg=cfg)
    batch = sample(policy)
    # What did better than the mean of its group of eight moved to 0.8, everything else to -0.8.
    success = torch.where(batch["valid"], batch["reward"], 0.0).sum(0).reshape(-1, 8)
    better = (success > success.mean(1, keepdim=True)).reshape(1, -1, 1)
    assert 0.05 < better.float().mean().item() < 0.6
    batch["action"] = torch.where(better.expand_as(batch["action"]), 0.8, -0.8)
    given: list[Tensor] = []
    compute = PI0_CFG_Adapter.compute_weighted_loss

    def spy(adapter: PI0_CFG_Adapter, samples: Any, advantages: Tensor) -> Tensor:
        given.append(advantages)
        return compute(adapter, samples, advantages)

    monkeypatch.setattr(PI0_CFG_Adapter, "compute_weighted_loss", spy)
    before, after = (algorithm.update(batch)["loss"].item() for _ in range(2))
    assert after < 0.9 * before
    assert len(given) == 40
    assert given[0].shape == (int(batch["valid"].sum()), 1)
    assert given[0].unique().numel() > 2
    with torch.no_grad():
        action = policy(batch["observation"], deterministic=True).action
    assert action.mean().item() > 0.5


def test_the_weighted_flow_needs_a_flow() -> None:
    with refused(ConfigError, "algo.loss", "weighted_flow", "policy.kind", "policy.head", "flow"):
        RLOO(policy=make_policy(), cfg=RLOOConfig(loss="weighted_flow"))
    widening = VLAPolicy(OBSERVATION_SPACE, ACTION_SPACE, chunk=2, head="flow", noise="last_step")
    with refused(ConfigError, "policy.noise", "last_step", "every_step"):
        RLOO(policy=widening, cfg=RLOOConfig(loss="weighted_flow"))


def test_in_bf16_the_ratio_begins_at_one_and_the_step_is_nearly_the_same() -> None:
    exact, batch = setup(**ONE_STEP)
    exact.update(batch)
    rounded, batch = setup(**ONE_STEP)
    rounded = RLOO(policy=rounded.policy, cfg=rounded.cfg, acceleration=Acceleration(precision="bf16"))
    metrics = rounded.update(batch)
    assert metrics["approx_kl"].item() == 0.0
    cosine = torch.cosine_similarity(exact.optimizer.gradient, rounded.optimizer.gradient, dim=0)
    assert 0.99 < cosine.item() < 1.0


def test_imitation_holds_on_to_demonstrations() -> None:
    state = torch.rand(64, 2) * 2 - 1
    shown = TensorDict(
        {
            "observation": TensorDict({"state": state}, batch_size=[64]),
            "action": torch.full((64, CHUNK), 0.7),
            "reward": torch.zeros(64, 1),
        },
        batch_size=[64],
    )

    def likelihood(algorithm: RLOO) -> float:
        log_prob, _ = algorithm.policy.evaluate_actions(shown["observation"], shown["action"])
        return float(log_prob.mean())

    found = {}
    for coef in (0.0, 2.0):
        algorithm, batch = setup(imitation_coef=coef, imitation_batch_size=16)
        before = likelihood(algorithm)
        if coef:
            with refused(ConfigError, "algo.imitation_coef", "task.demos"):
                algorithm.update(batch)
            algorithm.remember(shown)
        metrics = [algorithm.update(batch) for _ in range(5)]
        found[coef] = likelihood(algorithm) - before
        assert ("imitation_loss" in metrics[0]) == bool(coef)
    assert found[2.0] > 0.5 > found[0.0]


def test_the_weight_of_imitation_means_the_same_for_every_head_and_leaves_the_deviation_alone() -> None:
    # The mean of (b - 0.7)² at b = 0 has the gradient -1.4 in all, whatever the deviation, the chunk and the head.
    obs = TensorDict({"state": torch.zeros(8, 2)}, batch_size=[8])
    shown = TensorDict({"observation": obs, "action": torch.full((8, CHUNK), 0.7)}, batch_size=[8])
    heads: dict[Literal["likelihood", "flow"], dict[str, Any]] = {"likelihood": {"init_std": 0.5}, "flow": {}}
    policies: dict[str, tuple[Policy, Any]] = {}
    for head, options in heads.items():
        vla = VLAPolicy(OBSERVATION_SPACE, ACTION_SPACE, chunk=2, head=head, width=32, depth=1, num_heads=2, **options)
        policies[head] = vla, vla.expert.head
    mlp = make_policy()
    policies["mlp"] = mlp, mlp.actor.action_head.head  # type: ignore[union-attr]
    for name, (policy, layer) in policies.items():
        torch.manual_seed(0)
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
        # All fail alike, so there is nothing to learn but this; a trace of entropy makes it take the step even so.
        batch = sample(policy)
        batch["reward"].zero_()
        cfg = RLOOConfig(**ONE_STEP, imitation_coef=1.0, imitation_batch_size=20_000, entropy_coef=1e-30)
        algorithm = RLOO(policy=policy, cfg=cfg)
        algorithm.remember(shown)
        assert algorithm.update(batch)["updates"].item() == 1.0
        found = gradients(algorithm)
        (bias,) = [key for key, value in policy.named_parameters() if value is layer.bias]
        assert found[bias].sum().item() == pytest.approx(-1.4, abs=0.05), name
        deviations = [value for key, value in found.items() if key.endswith("log_std")]
        assert all(value.abs().max() < 1e-20 for value in deviations)
        assert bool(deviations) == (name != "flow")


def test_compiled_equals_eager() -> None:
    eager = updated(num_epochs=2)
    algorithm, batch = setup(num_epochs=2)
    algorithm = RLOO(policy=algorithm.policy, cfg=algorithm.cfg, acceleration=Acceleration(compile=True))
    torch.manual_seed(2)
    algorithm.update(batch)
    torch.testing.assert_close(weights(algorithm), eager, rtol=1e-4, atol=1e-5)


def test_success_is_that_of_all_sampled_episodes_where_the_batch_says_so() -> None:
    algorithm, batch = setup()
    own = algorithm.update(batch)["success"].item()
    assert own == pytest.approx(batch["reward"].sum(0).mean().item())
    batch["sampled_success"] = torch.full_like(batch["reward"], 0.125)
    assert algorithm.update(batch)["success"].item() == 0.125
    del batch["sampled_success"], batch["metric"]
    assert algorithm.update(batch)["success"].item() == pytest.approx(own)


def test_a_collapse_puts_the_best_weights_back_and_says_so() -> None:
    algorithm, batch = setup(collapse_ratio=0.5)
    good = weights(algorithm)
    batch["sampled_success"] = torch.full_like(batch["reward"], 0.8)
    assert algorithm.update(batch)["collapsed"].item() == 0.0
    batch["sampled_success"].fill_(0.41)  # above half of 0.8, and below it: no new best
    assert algorithm.update(batch)["collapsed"].item() == 0.0
    assert not torch.equal(weights(algorithm), good)
    batch["sampled_success"].fill_(0.39)
    assert algorithm.update(batch)["collapsed"].item() == 1.0
    assert torch.equal(weights(algorithm), good)
    assert not algorithm.optimizer.state["mean"].any()


def test_a_policy_that_fails_again_after_it_was_put_back_is_not_put_back_forever() -> None:
    algorithm, batch = setup(collapse_ratio=0.5)
    batch["sampled_success"] = torch.full_like(batch["reward"], 0.8)
    algorithm.update(batch)
    batch["sampled_success"].fill_(0.1)
    collapsed = [algorithm.update(batch)["collapsed"].item() for _ in range(4)]
    assert collapsed == [1.0, 0.0, 0.0, 0.0]
    assert algorithm.guard is not None
    assert algorithm.guard.best == pytest.approx(0.1)


def test_one_lucky_batch_counts_half() -> None:
    algorithm, _ = setup()
    guard = CollapseGuard(0.5, algorithm.optimizer)
    for success in (0.2, 0.6):
        guard.check(success)
    assert guard.best == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rloo_batch_size": 1}, ("algo.rloo_batch_size", 2, 1)),
        ({"num_epochs": 0}, ("algo.num_epochs", 1, 0)),
        ({"micro_batch_size": 0}, ("algo.micro_batch_size", 1, "null", 0)),
        ({"clip_coef": 1.0}, ("algo.clip_coef", "(0, 1)", 1.0)),
        ({"clip_coef_high": 0.0}, ("algo.clip_coef_high", "null", 0.0)),
        ({"learning_rate": 0.0}, ("algo.learning_rate", 0.0)),
        ({"kl_coef": -0.1}, ("algo.kl_coef", -0.1)),
        ({"collapse_ratio": 1.0}, ("algo.collapse_ratio", "(0, 1)", "null", 1.0)),
        ({"baseline": "groups"}, ("algo.baseline", "'groups'", "Did you mean 'group'")),
        ({"loss": "weighted_flow", "kl_coef": 0.1}, ("algo.kl_coef", 0, "algo.loss", "weighted_flow", 0.1)),
        ({"num_groups": 2.5}, ("algo.num_groups", 2.5)),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], named: tuple[object, ...]) -> None:
    with refused(ConfigError, *named):
        RLOOConfig(**options)


def test_a_batch_without_groups_is_refused() -> None:
    algorithm, batch = setup()
    with refused(KeyError, "RLOO.update", "'group'", "RolloutGenerator"):
        algorithm.update(batch.exclude("group"))


def test_it_learns_the_group_bandit_from_success_alone() -> None:
    policy = make_policy(init_std=0.6)
    algorithm = RLOO(policy=policy, cfg=RLOOConfig(learning_rate=3e-3, num_epochs=4))

    @torch.no_grad()
    def solved() -> float:
        state = torch.rand(4000, 2) * 2 - 1
        obs = TensorDict({"state": state}, batch_size=[4000])
        return reaches(state, policy(obs, deterministic=True).action).float().mean().item()

    assert solved() < 0.4
    for _ in range(40):
        metrics = algorithm.update(sample(policy, num_groups=32, length=1))
        assert metrics["nonfinite"].item() == 0.0
    assert solved() > 0.9


def test_the_gradient_of_the_divergence_is_that_of_the_policy_from_its_start() -> None:
    policy = make_policy()
    algorithm = RLOO(policy=policy, cfg=RLOOConfig(**ONE_STEP, kl_coef=1.0))
    with torch.no_grad():
        policy.get_parameter("actor.action_head.log_std").add_(math.log(2.0))
    batch = sample(policy, num_groups=5_000, length=1)
    batch["reward"].zero_()  # all fail alike: nothing but the divergence has a gradient
    algorithm.update(batch)
    gradient = gradients(algorithm)["actor.action_head.log_std"]
    # d/d log σ of KL(N(μ, σ) ‖ N(μ, σ₀)) is σ²/σ₀² − 1 = 3; the divergence the other way round would give 3/4.
    torch.testing.assert_close(gradient, torch.full_like(gradient, 3.0), rtol=0.1, atol=0.0)


def test_the_weighted_flow_is_told_which_actions_were_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_vla("flow")
    algorithm = RLOO(policy=policy, cfg=RLOOConfig(loss="weighted_flow", num_epochs=1, num_minibatches=1))
    batch = sample(policy)
    steps = torch.randint(1, 3, batch["reward"].shape)
    batch["info"] = TensorDict({"control_steps": steps}, batch_size=batch.shape)
    compute, told = PI0_CFG_Adapter.compute_weighted_loss, []

    def spy(adapter: PI0_CFG_Adapter, samples: Any, advantages: Tensor) -> Tensor:
        told.append(samples["valid_steps"].sum())
        return compute(adapter, samples, advantages)

    monkeypatch.setattr(PI0_CFG_Adapter, "compute_weighted_loss", spy)
    algorithm.update(batch)
    assert told == [(steps * batch["valid"]).sum()]
