"""PPO-ROA: what each phase trains, the losses written out, the phase boundary, and exact resume around it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.refusals import refused
from torch import Tensor

from apexrl import PPOROA, AsyncCollector, Config, PPOROAConfig, ROAPolicy, SyncCollector, Trainer, make_env
from apexrl.agent import TrainingConfig
from apexrl.core.errors import CheckpointError, ConfigError, DivergenceError
from apexrl.core.system.acceleration import Acceleration
from apexrl.core.types import Evaluation
from apexrl.policies import Policy
from apexrl.policies.config import PolicyConfig
from apexrl.run.build import make_policy
from apexrl.run.tasks import TaskConfig

NUM_ENVS, NUM_STEPS = 8, 8
MODULES = ("encoder_priv", "actor", "actor_adapt", "adapt_module", "adapt_ema", "critic")
PHASES = ("train", "finetune")


LAYERS: dict[str, Any] = {
    "hidden_dims": (16,), "encoder_dims": (8,), "adapt_dims": (16,), "critic_cfg": {"hidden_dims": (16,)},
}  # fmt: skip
FEW_LAYERS: dict[str, Any] = {
    "hidden_dims": (), "encoder_dims": (), "adapt_dims": (8,), "critic_cfg": {"hidden_dims": ()},
}  # fmt: skip


def make_roa(
    acceleration: Acceleration | None = None,
    layers: dict[str, Any] = LAYERS,
    normalize_obs: bool = True,
    **options: Any,
) -> PPOROA:
    """A small PPO-ROA for ``payload``, the same every time; the teacher's standard deviation is another than ours."""
    torch.manual_seed(0)
    policy = ROAPolicy.for_env(make_env("payload", 1), history=24, **layers, normalize_obs=normalize_obs)
    with torch.no_grad():
        log_std(policy.actor).fill_(-0.5)
    defaults = {"num_steps": NUM_STEPS, "num_epochs": 2, "num_minibatches": 2, "adapt_minibatches": 2, "clip_coef": 0.2}
    return PPOROA(policy, PPOROAConfig(**{**defaults, **options}), acceleration=acceleration)


def log_std(actor: Any) -> Tensor:
    found: Tensor = actor.action_head.log_std
    return found


def make_collector(algorithm: PPOROA, num_envs: int = NUM_ENVS) -> SyncCollector:
    env = make_env("payload", num_envs)
    return SyncCollector(env, algorithm.rollout_policy, keep=PPOROA.required_keys, seed=0)


def setup(**options: Any) -> tuple[PPOROA, TensorDict]:
    """A PPO-ROA and one rollout of what acts in its phase."""
    algorithm = make_roa(**options)
    return algorithm, make_collector(algorithm).collect(NUM_STEPS)


def snapshot(algorithm: PPOROA) -> dict[str, Tensor]:
    """The parameters of each module as one tensor."""
    return {name: flat(getattr(algorithm.policy, name)) for name in MODULES}


def flat(module: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def changed(algorithm: PPOROA, before: dict[str, Tensor]) -> set[str]:
    return {name for name, value in snapshot(algorithm).items() if not torch.equal(value, before[name])}


def state(algorithm: PPOROA) -> Tensor:
    return torch.cat([value.flatten().double() for value in algorithm.policy.state_dict().values()])


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stale_rollouts_are_compared_with_the_policy_at_the_start_of_the_update(phase: Any, precision: Any) -> None:
    acceleration = Acceleration(precision=precision)
    options = {"phase": phase, "num_epochs": 1, "num_minibatches": 1, "target_kl": 0.01, "finetune_target_kl": 0.01}
    algorithm, batch = setup(acceleration=acceleration, **options)
    batch["policy_version"] = torch.zeros(NUM_STEPS, NUM_ENVS, 1, dtype=torch.long)
    batch["sample_log_prob"] += 0.5
    metrics = algorithm.update(batch)
    assert metrics["updates"] == 1.0
    assert metrics["approx_kl"] < 1e-6


@pytest.mark.parametrize("distribution", ["gaussian", "squashed_gaussian"])
def test_a_student_starts_with_the_teachers_deviation_where_it_depends_on_the_state(distribution: str) -> None:
    torch.manual_seed(0)
    env = make_env("payload", NUM_ENVS)
    head = {"state_dependent_std": True, "distribution": distribution}
    policy = ROAPolicy.for_env(env, history=24, **LAYERS, head_options=head)
    log_std = policy.actor.action_head.head.weight.shape[0] // 2
    with torch.no_grad():  # a teacher that has learned to explore less, and in some states more than in others
        policy.actor.action_head.head.bias[log_std:] = -1.5
        policy.actor.action_head.head.weight[log_std:] *= 100.0
    algorithm = PPOROA(policy, PPOROAConfig(num_steps=NUM_STEPS, learning_rate=1e-6, adapt_learning_rate=0.01))
    batch = make_collector(algorithm).collect(NUM_STEPS)
    algorithm.train_policy(batch)
    for _ in range(50):
        algorithm.train_adapt(batch)
    algorithm.begin_phase("finetune")

    def deviations(view: Any) -> Tensor:
        found = view.distribution(batch["observation"])
        log_std: Tensor = getattr(found, "base", found).log_std
        return log_std.detach()

    teacher, student = deviations(policy.teacher), deviations(policy.student)
    error, spread = student - teacher, teacher.std(dim=(0, 1)).mean()
    assert spread > 0.15, "it depends on the state"
    assert error.mean().abs() < 0.05, "a student that was not taught starts 1.5 above"
    assert error.std() < 0.5 * spread


# Who learns in which phase


@pytest.mark.parametrize(
    ("phase", "by_policy", "by_adapt"),
    [
        ("train", {"encoder_priv", "actor", "critic"}, {"adapt_module", "actor_adapt", "adapt_ema"}),
        ("finetune", {"actor_adapt", "critic"}, {"adapt_module", "adapt_ema"}),
    ],
)
def test_each_half_of_the_update_trains_its_modules_and_no_others(
    phase: str, by_policy: set[str], by_adapt: set[str]
) -> None:
    algorithm, batch = setup(phase=phase, entropy_coef=0.01, encoder_penalty=1.0)
    algorithm.adjust_learning_rate(0.5)
    before = snapshot(algorithm)
    algorithm.train_policy(batch)
    assert changed(algorithm, before) == by_policy
    before = snapshot(algorithm)
    algorithm.train_adapt(batch)
    assert changed(algorithm, before) == by_adapt


def test_finetune_leaves_encoder_and_teacher_alone_to_the_last_bit() -> None:
    algorithm = make_roa(phase="finetune")
    collector, before = make_collector(algorithm), snapshot(algorithm)
    obs = collector.collect(NUM_STEPS)["observation"]
    algorithm.policy.update_normalizer(obs)
    teacher: Any = algorithm.roa.teacher
    acted = teacher.distribution(obs).mode
    for _ in range(4):
        metrics = algorithm.update(collector.collect(NUM_STEPS))
    assert changed(algorithm, before) == {"actor_adapt", "critic", "adapt_module", "adapt_ema"}
    assert torch.equal(teacher.distribution(obs).mode, acted), "the normaliser moved its inputs"
    assert "imitation_loss" not in metrics


def test_imitation_sends_no_gradient_into_what_it_imitates_or_what_it_is_given() -> None:
    runs = []
    for imitate in (True, False):
        algorithm, batch = setup(phase="train")
        algorithm.train_policy(batch)
        if not imitate:
            algorithm.imitate = None
        torch.manual_seed(1)
        algorithm.train_adapt(batch)
        runs.append(snapshot(algorithm))
    differ = {name for name in MODULES if not torch.equal(runs[0][name], runs[1][name])}
    assert differ == {"actor_adapt"}


# The losses


def test_adaptation_and_imitation_follow_the_gradients_of_the_written_out_losses() -> None:
    algorithm, batch = setup(phase="train", adapt_epochs=1, adapt_minibatches=1, max_grad_norm=1e9, min_frames=1)
    algorithm.train_policy(batch)
    policy: ROAPolicy = copy.deepcopy(algorithm.roa)
    metrics = algorithm.train_adapt(batch)
    obs: Any = policy.normalized(batch["observation"].reshape(-1))
    feature = policy.encoder_priv(obs).detach()
    adapt_loss = (policy.adapt_module(obs) - feature).square().mean()
    # The student is given the guess from before the step, and imitates the mean.
    guess = policy.adapt_module(obs).detach()
    imitation_loss = (policy.actor_adapt(obs, guess).mode - policy.actor(obs, feature).mode.detach()).square().mean()
    assert algorithm.imitate is not None
    for name, loss, module, optimizer in (
        ("adapt_loss", adapt_loss, policy.adapt_module, algorithm.adapt.optimizer),
        ("imitation_loss", imitation_loss, policy.actor_adapt, algorithm.imitate.optimizer),
    ):
        parameters = list(module.parameters())
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        expected = torch.cat([gradient.flatten() for gradient in gradients])
        torch.testing.assert_close(optimizer.gradient, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(metrics[name], loss.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("phase", PHASES)
def test_the_average_moves_by_tau_to_the_last_bit(phase: str) -> None:
    algorithm, batch = setup(phase=phase)
    old = flat(algorithm.roa.adapt_ema)
    for _ in range(2):
        algorithm.update(batch)
        new = 0.96 * old + 0.04 * flat(algorithm.roa.adapt_module)
        assert torch.equal(flat(algorithm.roa.adapt_ema), new)
        old = new


def windows(num_frames: list[int]) -> dict[str, Tensor]:
    """Observations of which each window has so many frames, the others zeros, and every one other physics."""
    torch.manual_seed(3)
    obs: Any = make_env("payload", len(num_frames)).reset(seed=0)
    frames = torch.randn(len(num_frames), 24, 4)
    for row, number in enumerate(num_frames):
        frames[row, : 24 - number] = 0.0
    return {**obs, "policy": frames.flatten(1)}


AT_ONCE: dict[str, Any] = {"num_epochs": 1, "num_minibatches": 1, "adapt_epochs": 1, "adapt_minibatches": 1}


def rollout_of(groups: dict[str, Tensor], algorithm: PPOROA) -> TensorDict:
    """A rollout of one step in which every environment shows its row of the observations."""
    count = len(groups["policy"])
    batch = make_collector(algorithm, count).collect(1)
    batch["observation"] = TensorDict(groups, batch_size=[count]).unsqueeze(0)
    return batch


@pytest.mark.parametrize(
    ("min_frames", "counts"),
    [(1, [0, 1, 1, 1, 1]), (2, [0, 0, 1, 1, 1]), (10, [0, 0, 0, 1, 1]), (24, [0, 0, 0, 0, 1]), (99, [0, 0, 0, 0, 1])],
)
def test_windows_with_too_few_frames_teach_nothing(min_frames: int, counts: list[int]) -> None:
    algorithm = make_roa(phase="train", min_frames=min_frames, max_grad_norm=1e9, **AT_ONCE)
    batch = rollout_of(windows([0, 1, 2, 10, 24]), algorithm)
    algorithm.train_policy(batch)
    policy, optimizer = copy.deepcopy(algorithm.roa), algorithm.adapt.optimizer
    metrics = algorithm.train_adapt(batch)
    kept = batch["observation"][0][torch.tensor(counts, dtype=torch.bool)]
    loss = (policy.adapt_module(kept) - policy.encoder_priv(kept).detach()).square().mean()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.adapt_module.parameters()))])
    torch.testing.assert_close(optimizer.gradient, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(metrics["adapt_loss"], loss.detach())


def test_a_minibatch_without_any_history_changes_no_adaptation_module() -> None:
    algorithm = make_roa(phase="finetune", **AT_ONCE)
    batch = rollout_of(windows([0, 1, 1]), algorithm)
    algorithm.train_policy(batch)
    before = snapshot(algorithm)
    metrics = algorithm.train_adapt(batch)
    assert changed(algorithm, before) <= {"adapt_ema"}, "the average moves towards what stood still, by rounding"
    assert metrics["nonfinite"] == 0


def test_the_encoder_is_drawn_towards_what_can_be_inferred() -> None:
    def gradients(penalty: float) -> dict[str, Tensor]:
        algorithm, batch = setup(
            phase="train", encoder_penalty=penalty, num_epochs=1, num_minibatches=1, max_grad_norm=1e9
        )
        algorithm.adjust_learning_rate(0.5)
        policy, obs = copy.deepcopy(algorithm.roa), batch["observation"]
        algorithm.train_policy(batch)
        distance = (policy.encoder_priv(obs) - policy.adapt_module(obs).detach()).square().mean()
        expected = torch.autograd.grad(distance, list(policy.encoder_priv.parameters()))
        found = algorithm.optimizer.views(algorithm.optimizer.gradient)
        return {**found, "expected": torch.cat([g.flatten() for g in expected])}

    with_penalty, without = gradients(4.0), gradients(0.0)
    names = [name for name in without if name != "expected"]
    apart = {name: with_penalty[name] - without[name] for name in names}
    encoder = torch.cat([apart[name].flatten() for name in names if name.startswith("latent.")])
    # Half of the training is over, so the weight is 4 · ½.
    torch.testing.assert_close(encoder, 2.0 * without["expected"], rtol=1e-3, atol=1e-5)
    assert all(not apart[name].any() for name in names if not name.startswith("latent."))


@pytest.mark.parametrize(
    ("phase", "progress", "weight"),
    [("train", 0.0, 0.0), ("train", 0.25, 0.5), ("train", 1.0, 2.0), ("both", 0.35, 1.0), ("both", 0.7 - 1e-9, 2.0)],
)
def test_the_penalty_grows_to_its_weight_over_the_train_phase(phase: str, progress: float, weight: float) -> None:
    algorithm = make_roa(phase=phase, encoder_penalty=2.0)
    assert float(algorithm.state_dict()["terms"]["encoder_distance"]["weight"]) == 0.0
    algorithm.adjust_learning_rate(progress)
    assert float(algorithm.state_dict()["terms"]["encoder_distance"]["weight"]) == pytest.approx(weight)


def test_policy_and_critic_are_clipped_apart() -> None:
    def clipped(value_coef: float) -> tuple[Tensor, Tensor]:
        algorithm, batch = setup(
            phase="train", value_coef=value_coef, max_grad_norm=1e-3, num_epochs=1, num_minibatches=1
        )
        algorithm.train_policy(batch)
        views = algorithm.optimizer.views(algorithm.optimizer.gradient)
        parts = [
            [g.flatten() for n, g in views.items() if n.startswith("critic.") == critic] for critic in (True, False)
        ]
        return torch.cat(parts[0]), torch.cat(parts[1])

    (critic, actor), (other_critic, same_actor) = clipped(1.0), clipped(100.0)
    assert torch.equal(actor, same_actor)
    for part in (critic, other_critic, actor):
        assert float(part.norm()) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize(
    ("phase", "option"),
    [
        ("train", {"adapt_epochs": 1}),
        ("train", {"adapt_minibatches": 3}),
        ("train", {"adapt_learning_rate": 1e-2}),
        ("train", {"ema_tau": 0.5}),
        ("train", {"min_frames": 5}),
        ("train", {"encoder_penalty": 1.0}),
        ("finetune", {"finetune_learning_rate": 1e-2}),
        ("finetune", {"finetune_target_kl": 1e-9}),
    ],
    ids=str,
)
def test_every_option_changes_the_update(phase: str, option: dict[str, Any]) -> None:
    def updated(**options: Any) -> Tensor:
        algorithm, batch = setup(phase=phase, **options)
        algorithm.adjust_learning_rate(0.5)
        torch.manual_seed(1)
        algorithm.update(batch)
        return state(algorithm)

    assert not torch.allclose(updated(**option), updated(), rtol=0, atol=1e-6)


def test_finetune_has_a_fixed_rate_and_stops_at_its_divergence() -> None:
    algorithm, batch = setup(phase="finetune", schedule="adaptive", learning_rate=0.5, finetune_target_kl=1e-12)
    metrics = algorithm.update(batch)
    assert float(metrics["learning_rate"]) == pytest.approx(1e-4)
    assert metrics["skipped"] == 1.0
    algorithm, batch = setup(phase="train", schedule="adaptive", finetune_target_kl=1e-12)
    assert algorithm.update(batch)["skipped"] == 0.0


# Phases


def test_both_goes_on_to_finetune_once_with_new_optimizers_and_the_teachers_noise() -> None:
    algorithm, batch = setup(phase="both", train_share=0.6, learning_rate=2e-3)
    algorithm.update(batch)
    policy, optimizer = algorithm.roa, algorithm.optimizer
    theirs, ours = log_std(policy.actor), log_std(policy.actor_adapt)
    algorithm.adjust_learning_rate(0.59)
    assert (algorithm.phase, algorithm.optimizer) == ("train", optimizer)
    assert not torch.equal(ours, theirs)
    before = snapshot(algorithm)
    algorithm.adjust_learning_rate(0.6)
    assert algorithm.phase == "finetune"
    assert torch.equal(ours, theirs)
    assert changed(algorithm, before) == {"actor_adapt"}  # by the standard deviation alone
    assert algorithm.imitate is None
    for fresh, rate in ((algorithm.optimizer, 1e-4), (algorithm.adapt.optimizer, 1e-3)):
        assert float(fresh.learning_rate) == pytest.approx(rate)
        assert not fresh.state["mean"].any()
        assert fresh.state["mean_decay"] == 1.0
    with torch.no_grad():
        ours.add_(1.0)
    second = algorithm.optimizer
    algorithm.adjust_learning_rate(0.9)
    assert (algorithm.phase, algorithm.optimizer) == ("finetune", second)
    assert not torch.equal(ours, theirs)


@pytest.mark.parametrize("phase", PHASES)
def test_a_single_phase_stays(phase: str) -> None:
    algorithm = make_roa(phase=phase)
    optimizer = algorithm.optimizer
    algorithm.adjust_learning_rate(1.0)
    assert (algorithm.phase, algorithm.optimizer) == (phase, optimizer)


def test_the_policy_that_acts() -> None:
    algorithm = make_roa(phase="both")
    policy = algorithm.roa
    assert algorithm.rollout_policy is algorithm.get_rollout_policy("train").policy is policy.teacher
    assert algorithm.get_rollout_policy("eval").policy is policy
    algorithm.begin_phase("finetune")
    assert algorithm.rollout_policy is algorithm.get_rollout_policy().policy is policy.student
    assert algorithm.get_rollout_policy("eval").policy is policy
    with refused(ConfigError, "train", "eval", "'deploy'"):
        algorithm.get_rollout_policy("deploy")


@pytest.mark.parametrize("in_background", [False, True])
def test_collection_goes_over_to_the_student_with_the_phase(
    in_background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = make_roa(phase="both", train_share=0.5)
    env = make_env("payload", NUM_ENVS)
    keep: Any = PPOROA.required_keys
    collector = (
        AsyncCollector(env, algorithm.rollout_policy, keep=keep, seed=0, max_staleness=0)
        if in_background
        else SyncCollector(env, algorithm.rollout_policy, keep=keep, seed=0)
    )
    trainer = Trainer(env, algorithm.policy, algorithm, collector=collector)
    acted: list[str] = []
    update = algorithm.update

    def spy(batch: TensorDict) -> dict[str, Tensor]:
        views: dict[str, Policy] = {"teacher": algorithm.roa.teacher, "student": algorithm.roa.student}
        for name, view in views.items():
            log_prob, _ = view.evaluate_actions(batch["observation"], batch["action"])
            if torch.allclose(log_prob, batch["sample_log_prob"], atol=1e-4):
                acted.append(name)
        return update(batch)

    monkeypatch.setattr(algorithm, "update", spy)
    try:
        trainer.learn(5 * NUM_STEPS * NUM_ENVS)  # the first rollout teaches the normaliser
    finally:
        trainer.close()
    assert acted == ["teacher", "teacher", "student", "student"]


@pytest.mark.parametrize("phase", PHASES)
def test_the_ratio_is_one_in_the_first_minibatch(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = make_roa(phase=phase)
    collector = make_collector(algorithm)
    ratios: list[Tensor] = []
    evaluate = algorithm.loss.evaluate

    def spy(batch: Any) -> Evaluation:
        evaluation = evaluate(batch)
        ratios.append((evaluation.log_prob - batch["sample_log_prob"]).exp().detach())
        return evaluation

    monkeypatch.setattr(algorithm.loss, "evaluate", spy)
    for _ in range(3):
        ratios.clear()
        algorithm.update(collector.collect(NUM_STEPS))
        assert (ratios[0] - 1).abs().max() < 1e-4


# The rest of the contract


def test_train_op_is_update() -> None:
    runs = []
    for name in ("update", "train_op"):
        algorithm, batch = setup()
        torch.manual_seed(1)
        getattr(algorithm, name)(batch)
        runs.append(state(algorithm))
    assert torch.equal(*runs)


def test_rollouts_may_change_their_shape() -> None:
    algorithm = make_roa(adapt_epochs=1)
    rows: list[int] = []
    algorithm.roa.adapt_module.register_forward_hook(lambda _, __, guess: rows.append(len(guess)))
    for num_envs, num_steps in ((8, 8), (4, 16), (8, 8), (3, 5)):
        batch = make_collector(algorithm, num_envs).collect(num_steps)
        assert algorithm.train_policy(batch)["nonfinite"] == 0
        assert algorithm.batch["advantage"].shape == (num_steps, num_envs, 1)
        rows.clear()
        assert algorithm.train_adapt(batch)["nonfinite"] == 0
        assert sum(rows) == num_envs * num_steps


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("key", ["reward", "priv", "policy"])
def test_a_batch_that_is_not_finite_changes_nothing_and_is_named(phase: str, key: str) -> None:
    algorithm, batch = setup(phase=phase)
    before = state(algorithm)
    place = batch[key] if key in batch.keys() else batch["observation"][key]  # noqa: SIM118
    place[3, 2] = float("nan")
    metrics = algorithm.update(batch)
    assert torch.equal(state(algorithm), before)
    assert metrics["nonfinite"] > 0
    with refused(DivergenceError, f"{key}'", "step 3", "environment 2"):
        algorithm.raise_diverged(batch)


def test_an_adaptation_that_is_not_finite_stops_the_run() -> None:
    # PPO trains the teacher, which does not use the module: only the adaptation can notice.
    algorithm, batch = setup(phase="train")
    with torch.no_grad():
        algorithm.roa.adapt_module.head.weight.fill_(1e30)
    before = state(algorithm)
    policy_metrics = algorithm.train_policy(batch)
    assert policy_metrics["nonfinite"] == 0
    after_policy = snapshot(algorithm)
    metrics = algorithm.train_adapt(batch)
    assert metrics["nonfinite"] == 1
    assert changed(algorithm, after_policy) == set()
    assert not torch.equal(state(algorithm), before)
    metrics = algorithm.update(batch)
    normalizer: Any = algorithm.roa.normalizer
    assert normalizer.normalizers["policy"].count == 0
    assert metrics["nonfinite"] > 0
    with pytest.raises(DivergenceError):
        algorithm.raise_diverged(batch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")
def test_compiled_updates_equal_eager_ones_in_both_phases() -> None:
    runs: list[list[Tensor]] = []
    for compile_it in (False, True):
        # Few layers compile sooner.
        algorithm = make_roa(
            Acceleration(compile=compile_it), FEW_LAYERS, normalize_obs=False, phase="both", encoder_penalty=0.1
        )
        collector = make_collector(algorithm)
        states = []
        for progress in (0.2, 0.4, 0.7, 0.8, 0.9):
            algorithm.update(collector.collect(NUM_STEPS))
            states.append(state(algorithm))
            algorithm.adjust_learning_rate(progress)
            collector.follow(algorithm.rollout_policy)
        assert algorithm.phase == "finetune"
        runs.append(states)
    for eager, compiled in zip(*runs, strict=True):
        assert (compiled - eager).abs().max() < 1e-5
    first, *_, last = runs[0]
    assert (last - first).abs().max() > 1e-3, "the weights moved by more than the tolerance"


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("adapt_epochs", 0, (1,)),
        ("adapt_minibatches", 0, (1,)),
        ("min_frames", 0, (1,)),
        ("adapt_learning_rate", 0.0, ()),
        ("finetune_learning_rate", -1.0, ()),
        ("finetune_target_kl", 0.0, ()),
        ("train_share", 0.0, ("(0, 1]",)),
        ("train_share", 1.5, ("(0, 1]",)),
        ("ema_tau", 1.1, ("(0, 1]",)),
        ("encoder_penalty", -0.1, ()),
        ("phase", "fintune", ("both, train, finetune", "Did you mean 'finetune'")),
        ("clip_coef", 2.0, ("(0, 1)",)),
        ("adapt_epochs", 1.5, ()),
    ],
)
def test_impossible_options_are_refused(field: str, value: Any, allowed: tuple[object, ...]) -> None:
    with refused(ConfigError, f"algo.{field}", repr(value), *allowed):
        PPOROAConfig(**{field: value})


@pytest.mark.parametrize("option", [{"actor_groups": ("policy",)}, {"rnn_hidden_dim": 32}], ids=str)
def test_options_of_other_policies_are_refused(option: dict[str, Any]) -> None:
    env = make_env("payload", 1)
    cpu = torch.device("cpu")
    make_policy(PolicyConfig(kind="roa"), env, cpu, PPOROAConfig())
    with refused(ConfigError, "policy.actor_groups", "policy.rnn_hidden_dim", "policy.kind", "roa"):
        make_policy(PolicyConfig(kind="roa", **option), env, cpu, PPOROAConfig())


def test_more_minibatches_than_samples_are_refused() -> None:
    algorithm, batch = setup(adapt_minibatches=65)
    with refused(ConfigError, "algo.adapt_minibatches", 65, 64):
        algorithm.update(batch)
    with refused(ConfigError, "algo.adapt_minibatches", 65, 64):
        Config(
            algo=PPOROAConfig(num_steps=8, adapt_minibatches=65),
            task=TaskConfig(num_envs=8),
            policy=PolicyConfig(kind="roa"),
        )


# Resume


def make_trainer(save_dir: Path) -> Trainer:
    algorithm = make_roa(phase="both", train_share=0.5, schedule="adaptive", encoder_penalty=0.1, normalize_reward=True)
    env = make_env("payload", NUM_ENVS, max_episode_steps=13)
    cfg = TrainingConfig(save_interval=1, keep_checkpoints=0, seed=1)
    return Trainer(env, algorithm.policy, algorithm, cfg, save_dir=save_dir)


def learned(trainer: Trainer, num_iterations: int = 8) -> list[dict[str, float]]:
    lines: list[dict[str, float]] = []

    def note(_: Trainer, stats: dict[str, float]) -> None:
        lines.append({name: value for name, value in stats.items() if not name.startswith("time/")})

    trainer.add_callback("post_iteration", note)
    trainer.learn((num_iterations + 1) * NUM_STEPS * NUM_ENVS)  # the first rollout teaches the normaliser
    return lines


def test_resume_is_exact_on_both_sides_of_the_boundary_and_across_it(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path)
    lines = learned(whole)
    assert ["train/imitation_loss" in line for line in lines] == [True] * 4 + [False] * 4
    # After 2: in train. After 3: the last update of train is to come. 4: just switched. 6: in finetune.
    for iteration in (2, 3, 4, 6):
        resumed = make_trainer(tmp_path / "unused")
        resumed.load_checkpoint(tmp_path / f"iteration_{iteration:06d}.pt")
        assert isinstance(resumed.algorithm, PPOROA)
        assert resumed.algorithm.phase == ("train" if iteration < 4 else "finetune")
        assert learned(resumed) == lines[iteration:]
        for name, value in whole.policy.state_dict().items():
            assert torch.equal(resumed.policy.state_dict()[name], value), name


def test_a_trainer_goes_back_from_finetune_to_a_checkpoint_of_train(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    lines = list(learned(trainer))
    trainer.load_checkpoint("iteration_000002.pt")
    assert trainer.iteration == 2
    assert learned(trainer) == lines[2:]


def test_a_checkpoint_that_does_not_fit_changes_neither_phase_nor_weights(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    learned(trainer)
    content = torch.load(tmp_path / "iteration_000006.pt", weights_only=True)
    content["algorithm"]["adapt"]["state"]["mean"] = torch.zeros(3)
    torch.save(content, tmp_path / "broken.pt")
    other = make_trainer(tmp_path / "unused")
    assert isinstance(other.algorithm, PPOROA)
    before = state(other.algorithm)
    with refused(CheckpointError, "broken.pt", "'algorithm'"):
        other.load_checkpoint(tmp_path / "broken.pt")
    assert other.algorithm.phase == "train"
    assert torch.equal(state(other.algorithm), before)
