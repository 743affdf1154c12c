"""Document 001: rollout against training, and PPO-ROA, as the document writes them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl import PPOROA, ActorCritic, Policy, PPOROAConfig, ROAPolicy, SyncCollector, Trainer, make_env
from apexrl.agent.loggers import JsonlLogger
from apexrl.core.system.files import read_json_lines
from apexrl.core.types import CMD_KEY, OBJECT_KEY, OBS_KEY, OBS_PRIV_KEY, PRIV_FEATURE_KEY, PRIV_PRED_KEY
from apexrl.envs import VecEnv

MODULES = ("encoder_priv", "actor", "actor_adapt", "adapt_module", "adapt_ema", "critic")
N, T = 4, 32


def make_networks(env: VecEnv) -> ROAPolicy:
    torch.manual_seed(0)
    return ROAPolicy.for_env(env, history=24, hidden_dims=(16,), adapt_dims=(16,), normalize_obs=True)


def everything(policy: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in policy.state_dict().items()}


def modules_that_differ(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name.split(".")[0] for name, value in before.items() if not torch.equal(value, after[name])}


def counted(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the calls of a method by the length of a list, which is returned."""
    method = getattr(owner, name)
    calls: list[int] = []

    def spy(argument: Any) -> Any:
        calls.append(len(calls))
        return method(argument)

    monkeypatch.setattr(owner, name, spy)
    return calls


def calls_of(module: nn.Module) -> list[int]:
    """Note how many samples each later call of a module gets."""
    calls: list[int] = []
    module.register_forward_hook(lambda _, arguments, __: calls.append(len(arguments[0])))
    return calls


class Uses:
    """Which modules run, and whether in train mode, while a function does."""

    def __init__(self, policy: ROAPolicy) -> None:
        self.seen: dict[str, set[bool]] = {}
        for name in MODULES:
            getattr(policy, name).register_forward_hook(self._note(name))

    def _note(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, *_: Any) -> None:
            self.seen.setdefault(name, set()).add(module.training)

        return hook

    def of(self, function: Callable[..., Any], *arguments: Any) -> tuple[dict[str, set[bool]], Any]:
        self.seen = {}
        result = function(*arguments)
        return self.seen, result


# The complete training loop


class Wandb:
    """Stands in for the package."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def log(self, info: dict[str, Tensor]) -> None:
        self.logged.append({name: float(value) for name, value in info.items()})


@pytest.mark.parametrize("phase", ["train", "finetune"])
def test_the_complete_training_loop(phase: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_policy(env: VecEnv) -> PPOROA:
        return PPOROA(make_networks(env), PPOROAConfig(phase=phase))

    wandb, total_iters, train_every = Wandb(), 2, T
    env = make_env("payload", N)
    steps = counted(env, "step", monkeypatch)

    # The document's lines.
    policy = make_policy(env)
    rollout_policy = policy.get_rollout_policy("train")
    data_buf = TensorDict({}, batch_size=[N, T])

    carry: Any = env.reset()

    for i in range(total_iters):
        before = everything(policy.roa)
        with torch.inference_mode():
            rollout_policy.eval()
            for step in range(train_every):
                carry = rollout_policy(carry)

                td, carry = env.step_and_maybe_reset(carry)

                data_buf[:, step] = td

            values = policy.critic(data_buf)["state_value"]

        assert len(steps) == (i + 1) * T
        assert modules_that_differ(before, everything(policy.roa)) == set(), "a rollout updates nothing"

        info = policy.train_op(data_buf)

        wandb.log(info)

        # What the document says of these lines.
        assert len(steps) == (i + 1) * T, "training steps no environment"
        assert values.shape == (N, T, 1)
        latent = PRIV_FEATURE_KEY if phase == "train" else PRIV_PRED_KEY
        assert {"observation", "action", "sample_log_prob", "reward", "done", latent} <= set(data_buf.keys())
        assert set(data_buf["observation"].keys()) == {OBS_KEY, OBS_PRIV_KEY, CMD_KEY, OBJECT_KEY}
        assert not any(value.requires_grad for value in data_buf.values(include_nested=True, leaves_only=True))
        assert {"loss", "policy_loss", "value_loss", "adapt_loss"} <= set(info)
        differ = modules_that_differ(before, everything(policy.roa))
        assert differ >= {"critic", "adapt_module", "adapt_ema"}
        assert ("normalizer" in differ) == (phase == "train")  # finetune leaves what the teacher sees alone
    assert [all(map(math.isfinite, line.values())) for line in wandb.logged] == [True] * total_iters


def test_the_loop_collects_what_the_collector_does() -> None:
    # The same seeds: the loop of the document and our collector give the same batch, and learn the same from it.
    infos, states = [], []
    for by_hand in (True, False):
        env = make_env("payload", N, max_episode_steps=10)
        policy = PPOROA(make_networks(env), PPOROAConfig(phase="train"))
        torch.manual_seed(1)
        if by_hand:
            data_buf = TensorDict({}, batch_size=[N, T])
            carry: Any = env.reset(3)
            rollout_policy: Any = policy.get_rollout_policy("train")
            with torch.inference_mode():
                for step in range(T):
                    td, carry = env.step_and_maybe_reset(rollout_policy(carry))
                    data_buf[:, step] = td
                policy.critic(data_buf)
            assert data_buf["done"].any(), "also across the ends of episodes"
            infos.append(policy.train_op(data_buf))
        else:
            collector = SyncCollector(env, policy.rollout_policy, keep=policy.required_keys, seed=3)
            infos.append(policy.update(collector.collect(T)))
        states.append(everything(policy.roa))
    assert infos[0].keys() == infos[1].keys()
    for name, value in infos[0].items():
        torch.testing.assert_close(value, infos[1][name], rtol=0, atol=0)
    assert modules_that_differ(*states) == set()


def test_the_inside_of_train_op() -> None:
    env = make_env("payload", N)
    policy = PPOROA(make_networks(env), PPOROAConfig(phase="train", num_steps=8))
    tensordict = SyncCollector(env, policy.rollout_policy, seed=0).collect(8)
    info: dict[str, Tensor] = {}
    assert policy.roa_cfg.phase == "train"
    info.update(policy.train_policy(tensordict.copy()))
    info.update(policy.train_adapt(tensordict.copy()))
    assert {"policy_loss", "value_loss", "adapt_loss", "imitation_loss"} <= set(info)


@pytest.mark.parametrize("phase", ["train", "finetune"])
def test_the_formulas_of_train_policy_and_train_adapt(phase: Any) -> None:
    one: dict[str, Any] = dict.fromkeys(("num_epochs", "num_minibatches", "adapt_epochs", "adapt_minibatches"), 1)
    cfg = PPOROAConfig(phase=phase, normalize_advantage="none", min_frames=1, finetune_target_kl=10.0, **one)
    env = make_env("payload", N)
    policy = PPOROA(make_networks(env), cfg)
    tensordict = SyncCollector(env, policy.rollout_policy, keep=policy.required_keys, seed=0).collect(T)
    # As if the weights had moved since the rollout, so that the ratio is not 1 everywhere and some of it is clipped.
    tensordict["sample_log_prob"] += 0.3 * torch.randn_like(tensordict["sample_log_prob"])
    before = make_networks(env)
    before.load_state_dict(policy.roa.state_dict())
    info = policy.train_op(tensordict)
    after, obs = policy.roa, tensordict["observation"]
    exp, mse, eps = torch.exp, nn.functional.mse_loss, cfg.clip_coef

    with torch.no_grad():
        # _update_ppo
        actor = before.teacher if phase == "train" else before.student
        dist: Any = actor.get_dist(obs)
        log_probs = dist.log_prob(tensordict["action"])
        adv, ret = policy.batch["advantage"], policy.batch["return"]
        ratio = exp(log_probs - tensordict["sample_log_prob"])
        surr1 = adv * ratio
        surr2 = adv * ratio.clamp(1 - eps, 1 + eps)
        policy_loss = -torch.min(surr1, surr2).mean()
        assert (surr1 > surr2).any()
        torch.testing.assert_close(info["policy_loss"], policy_loss)
        torch.testing.assert_close(info["value_loss"], mse(before.get_value(obs), ret))

        # train_adapt, with the encoder and the teacher that PPO has just updated
        seen = before.normalized(obs)
        priv_feature, priv_pred = after.encoder_priv(seen), before.adapt_module(seen)
        torch.testing.assert_close(info["adapt_loss"], mse(priv_pred, priv_feature))
        if phase == "train":
            dist_teacher, dist_student = after.actor(seen, priv_feature), before.actor_adapt(seen, priv_pred)
            torch.testing.assert_close(info["imitation_loss"], mse(dist_student.mean, dist_teacher.mean))

        # soft_copy_(self.adapt_module, self.adapt_ema, tau=0.04)
        for old, new, ema in zip(
            before.adapt_ema.parameters(), after.adapt_module.parameters(), after.adapt_ema.parameters(), strict=True
        ):
            torch.testing.assert_close(ema, 0.96 * old + 0.04 * new)


@pytest.mark.parametrize("kind", ["teacher", "student", "actor-critic"])
def test_a_rollout_samples_and_training_evaluates_the_old_action(kind: str) -> None:
    env = make_env("payload", N)
    networks = make_networks(env)
    policy: Policy = ActorCritic.for_env(env) if kind == "actor-critic" else getattr(networks, kind)
    obs = env.reset(seed=0)

    with torch.inference_mode():
        dist = policy.get_dist(obs)
        action = dist.sample()
        log_prob = dist.log_prob(action)
    old_action, log_prob_old = action.clone(), log_prob.clone()

    dist = policy.get_dist(obs)
    log_prob_new = dist.log_prob(old_action)
    ratio = torch.exp(log_prob_new - log_prob_old)
    torch.testing.assert_close(ratio, torch.ones(N, 1))
    assert log_prob_new.requires_grad
    assert not log_prob_old.requires_grad


def test_a_rollout_samples_and_an_evaluation_does_not() -> None:
    env = make_env("payload", N)
    algorithm = PPOROA(make_networks(env))
    carry = {"observation": env.reset(seed=0)}
    acting = algorithm.get_rollout_policy("train")
    assert not torch.equal(acting(carry)["action"], acting(carry)["action"])
    deployed = algorithm.get_rollout_policy("eval")
    assert torch.equal(deployed(carry)["action"], deployed(carry)["action"])
    # The next rollout uses the updated weights, because it is the same network.
    assert acting.policy is algorithm.get_rollout_policy("train").policy is algorithm.roa.teacher


# Which module is used, and which is updated, in which phase

TABLE = {
    "train": {
        "rollout": {"encoder_priv", "actor"},
        # The teacher is evaluated by PPO; adaptation and imitation read encoder and teacher once more.
        "training": {"encoder_priv", "actor", "actor_adapt", "adapt_module", "critic"},
        "updated": {"encoder_priv", "actor", "actor_adapt", "adapt_module", "adapt_ema", "critic"},
    },
    "finetune": {
        "rollout": {"actor_adapt", "adapt_ema"},
        "training": {"encoder_priv", "actor_adapt", "adapt_module", "adapt_ema", "critic"},
        "updated": {"actor_adapt", "adapt_module", "adapt_ema", "critic"},
    },
}


@pytest.mark.parametrize("phase", TABLE)
def test_the_table_of_modules(phase: Any) -> None:
    env = make_env("payload", N)
    policy = make_networks(env)
    algorithm = PPOROA(policy, PPOROAConfig(phase=phase, num_steps=8))
    trainer = Trainer(env, policy, algorithm)
    uses = Uses(policy)
    collector: Any = trainer.collector
    collector.collect(8)
    seen, steps = uses.of(collector.take_steps, 8)
    assert set(seen) == TABLE[phase]["rollout"]
    assert all(modes == {False} for modes in seen.values()), "evaluation mode"
    seen, _ = uses.of(collector.with_values, steps)
    assert (set(seen), seen["critic"]) == ({"critic"}, {False})
    batch, before = collector.collect(8), everything(policy)
    seen, _ = uses.of(algorithm.train_op, batch)
    assert set(seen) == TABLE[phase]["training"]
    assert all(modes == {True} for modes in seen.values()), "train mode"
    assert modules_that_differ(before, everything(policy)) - {"normalizer"} == TABLE[phase]["updated"]
    assert not policy.training


def test_train_op_runs_the_documented_epochs_and_minibatches() -> None:
    env = make_env("payload", N)
    policy = make_networks(env)
    algorithm = PPOROA(policy, PPOROAConfig())
    batch = Trainer(env, policy, algorithm).collector.collect(T)
    # Every minibatch of PPO asks the critic once, every one of the adaptation its module.
    steps, adapt_steps = calls_of(policy.critic), calls_of(policy.adapt_module)
    algorithm.train_op(batch)
    assert (len(steps), len(adapt_steps)) == (5 * 4, 2 * 4)


def test_the_share_of_time_in_rollout_and_training_is_logged(tmp_path: Path) -> None:
    env = make_env("payload", N)
    policy = make_networks(env)
    algorithm = PPOROA(policy, PPOROAConfig(num_steps=8))
    trainer = Trainer(env, policy, algorithm, loggers=[JsonlLogger(tmp_path / "metrics.jsonl")])
    trainer.learn(3 * 8 * N)  # the first rollout teaches the normaliser
    trainer.close()
    lines = read_json_lines(tmp_path / "metrics.jsonl")
    assert len(lines) == 2
    for line in lines:
        assert line["time/rollout_share"] + line["time/update_share"] == pytest.approx(1.0)
        assert 0.0 < line["time/rollout_share"] < 1.0
        assert line["time/fps"] > 0
