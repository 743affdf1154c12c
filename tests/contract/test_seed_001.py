"""Document 001: rollout against training, and PPO-ROA, nearly as the document writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl import PPOROA, PPOROAConfig, ROAPolicy, Trainer, make_env
from apexrl.envs import VecEnv
from apexrl.loggers import JsonlLogger, read_json_lines
from apexrl.rollout import rollout
from apexrl.types import CMD_KEY, OBJECT_KEY, OBS_KEY, OBS_PRIV_KEY, PRIV_FEATURE_KEY, PRIV_PRED_KEY

MODULES = ("encoder_priv", "actor", "actor_adapt", "adapt_module", "adapt_ema", "critic")
N, T = 4, 32


def make_policy(env: VecEnv) -> ROAPolicy:
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


@pytest.mark.parametrize("phase", ["train", "finetune"])
def test_the_complete_training_loop(phase: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_env("payload", N)
    policy = make_policy(env)
    algorithm = PPOROA(policy, PPOROAConfig(phase=phase))
    assert algorithm.num_steps == T  # train_every

    def step_and_maybe_reset(carry: dict[str, Any]) -> tuple[TensorDict, dict[str, Any]]:
        # env.step is called in one place: the rollout, here of one step with the action that was chosen.
        chosen = {name: value for name, value in carry.items() if name != "observation"}
        td, after = rollout(env, lambda _: chosen, {"observation": carry["observation"]}, 1)
        return td[0], after

    rollout_policy = algorithm.get_rollout_policy("train")
    example, carry = rollout(env, rollout_policy.act, {"observation": env.reset(seed=0)}, 1)
    data: Any = torch.zeros_like(example.expand(T, N))
    data_buf = data.transpose(0, 1)  # [N, T], a view: never a second layout
    steps = counted(env, "step", monkeypatch)
    for iteration in range(2):
        before = everything(policy)
        # ROLLOUT
        with torch.inference_mode():
            rollout_policy.eval()
            for step in range(T):
                carry = {**carry, **rollout_policy.act(carry)}
                td, carry = step_and_maybe_reset(carry)
                data_buf[:, step] = td
            # The critic runs once, batched, after the steps.
            values = policy.critic(policy.normalized(data["observation"]))
            data["value"], data["next_value"] = policy.values(data)
        assert len(steps) == (iteration + 1) * T
        assert modules_that_differ(before, everything(policy)) == set()
        assert torch.equal(data["value"], values)
        assert not any(value.requires_grad for value in data.values(include_nested=True, leaves_only=True))
        latent = PRIV_FEATURE_KEY if phase == "train" else PRIV_PRED_KEY
        assert {"observation", "action", "sample_log_prob", "reward", "done", latent} <= set(data.keys())
        assert set(data["observation"].keys()) == {OBS_KEY, OBS_PRIV_KEY, CMD_KEY, OBJECT_KEY}
        assert data_buf.batch_size == torch.Size([N, T])
        assert data_buf["reward"][:, 5].data_ptr() == data["reward"][5].data_ptr()
        # TRAINING: the stored actions are evaluated again, and nothing is stepped.
        info = algorithm.train_op(data)
        assert len(steps) == (iteration + 1) * T
        assert {"loss", "policy_loss", "value_loss", "adapt_loss"} <= set(info)
        differ = modules_that_differ(before, everything(policy))
        assert differ >= {"critic", "adapt_module", "adapt_ema"}
        assert ("normalizer" in differ) == (phase == "train")  # finetune leaves what the teacher sees alone


def test_a_rollout_samples_and_an_evaluation_does_not() -> None:
    env = make_env("payload", N)
    algorithm = PPOROA(make_policy(env))
    carry = {"observation": env.reset(seed=0)}
    acting = algorithm.get_rollout_policy("train")
    assert not torch.equal(acting.act(carry)["action"], acting.act(carry)["action"])
    deployed = algorithm.get_rollout_policy("eval")
    assert torch.equal(deployed.act(carry, deterministic=True)["action"], deployed.act(carry, True)["action"])
    # The next rollout uses the updated weights, because it is the same network.
    assert acting is algorithm.get_rollout_policy("train")


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
    policy = make_policy(env)
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


def test_train_op_runs_the_documented_epochs_and_minibatches(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_env("payload", N)
    policy = make_policy(env)
    algorithm = PPOROA(policy, PPOROAConfig())
    steps = counted(algorithm._run_step, "function", monkeypatch)
    adapt_steps = counted(algorithm._run_adapt_step, "function", monkeypatch)
    algorithm.train_op(Trainer(env, policy, algorithm).collector.collect(T))
    assert (len(steps), len(adapt_steps)) == (5 * 4, 2 * 4)


def test_the_share_of_time_in_rollout_and_training_is_logged(tmp_path: Path) -> None:
    env = make_env("payload", N)
    policy = make_policy(env)
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
