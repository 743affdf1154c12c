"""Updates from the same data, weights and random numbers give the same weights as Stable-Baselines3's."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from apexrl import PPO, SAC, ActorCritic, PPOConfig, SACConfig, SACPolicy, SyncCollector, make_env
from apexrl.policies.networks import RewardScaler, SquashedGaussian
from apexrl.policies.networks.distributions import StateDependentGaussian

sb3 = pytest.importorskip("stable_baselines3", reason="pip install 'apexrl[bench]'")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def gap(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert set(ours) == set(theirs)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


# PPO

PPO_LAYERS = {
    "actor.trunk.0": "mlp_extractor.policy_net.0",
    "actor.trunk.2": "mlp_extractor.policy_net.2",
    "actor.action_head.head": "action_net",
    "critic.trunk.0": "mlp_extractor.value_net.0",
    "critic.trunk.2": "mlp_extractor.value_net.2",
    "critic.head": "value_net",
}


def ppo_weights(policy: Any) -> dict[str, Tensor]:
    theirs = policy.state_dict()
    ours = {
        f"{name}.{part}": theirs[f"{their_name}.{part}"].clone()
        for name, their_name in PPO_LAYERS.items()
        for part in ("weight", "bias")
    }
    return {**ours, "actor.action_head.log_std": theirs["log_std"].clone()}


@pytest.mark.parametrize("gsde", [False, True])
def test_a_ppo_update(gsde: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, num_epochs, num_minibatches = 256, 3, 4
    model = sb3.PPO(
        "MlpPolicy", "Pendulum-v1", learning_rate=3e-4, n_steps=steps, batch_size=steps // num_minibatches,
        n_epochs=num_epochs, ent_coef=0.01, vf_coef=0.5, max_grad_norm=0.5, seed=0, device="cpu",
        use_sde=gsde, sde_sample_freq=4, policy_kwargs={"log_std_init": -2.0 if gsde else 0.0},
    )  # fmt: skip
    last: dict[str, Any] = {}
    with monkeypatch.context() as patched:
        patched.setattr(model, "train", lambda: None)  # one rollout, and no update yet
        model.learn(steps, callback=lambda found, _: last.update(found) is None)
    buffer = model.rollout_buffer
    env = make_env("Pendulum-v1", 1)
    policy = ActorCritic.for_env(env, actor_cfg={"gsde": gsde})
    policy.load_state_dict(ppo_weights(model.policy))
    with torch.no_grad():
        last_value = model.policy.predict_values(torch.as_tensor(last["new_obs"]))
    column = {
        name: torch.as_tensor(getattr(buffer, name)).reshape(steps, 1, 1)
        for name in ("rewards", "values", "log_probs", "episode_starts")
    }
    last_done = torch.as_tensor(last["dones"], dtype=torch.float32).view(1, 1, 1)
    done = torch.cat((column["episode_starts"][1:], last_done)) > 0
    assert done.any()
    batch = TensorDict(
        {
            "observation": torch.as_tensor(buffer.observations),
            "action": torch.as_tensor(buffer.actions),
            "reward": column[
                "rewards"
            ],  # they have added the value at time limits to it, so every end is a terminal one
            "value": column["values"],
            "next_value": torch.cat((column["values"][1:], last_value.view(1, 1, 1))),
            "sample_log_prob": column["log_probs"],
            "terminated": done,
            "truncated": torch.zeros_like(done),
            "done": done,
        },
        batch_size=[steps, 1],
    )
    cfg = PPOConfig(
        num_steps=steps,
        num_epochs=num_epochs,
        num_minibatches=num_minibatches,
        learning_rate=3e-4,
        schedule="fixed",
        normalize_advantage="minibatch",
        entropy_coef=0.01,
        value_coef=0.5,
        max_grad_norm=0.5,
    )
    orders = [np.random.default_rng(epoch).permutation(steps) for epoch in range(num_epochs)]
    theirs, ours = iter(orders), iter(orders)
    before = ppo_weights(model.policy)
    with monkeypatch.context() as patched:
        patched.setattr(np.random, "permutation", lambda _: next(theirs))
        model.train()
        patched.setattr(torch, "randperm", lambda *_, **__: torch.as_tensor(next(ours)))
        algorithm = PPO(policy=policy, cfg=cfg)
        algorithm.update(batch)
    np.testing.assert_allclose(algorithm.batch["advantage"].flatten(), buffer.advantages.flatten(), atol=1e-4)
    assert gap(before, ppo_weights(model.policy)) > 1e-3
    assert gap(dict(policy.state_dict()), ppo_weights(model.policy)) < 1e-6


def test_state_dependent_noise() -> None:
    torch.manual_seed(0)
    theirs = sb3.common.distributions.StateDependentNoiseDistribution(3, learn_features=False)
    _, log_std = theirs.proba_distribution_net(latent_dim=5, latent_sde_dim=5, log_std_init=-1.0)
    with torch.no_grad():
        log_std += 0.3 * torch.randn(5, 3)
    mean, features, action = torch.randn(7, 3), torch.randn(7, 5), torch.randn(7, 3)
    theirs.proba_distribution(mean, log_std, features)
    ours = StateDependentGaussian(mean, log_std, features, interval=4)
    torch.testing.assert_close(ours.log_prob(action).squeeze(-1), theirs.log_prob(action))
    torch.testing.assert_close(ours.entropy().squeeze(-1), theirs.entropy())
    gradients = [torch.autograd.grad(d.log_prob(action).sum(), log_std)[0] for d in (ours, theirs)]
    torch.testing.assert_close(*gradients)
    # Their matrix is σ ⊙ ε of ours.
    theirs.sample_weights(log_std, batch_size=7)
    noise = theirs.exploration_matrices / log_std.exp()
    torch.testing.assert_close(ours.sample_with(noise), theirs.sample())


# SAC


def sac_weights(policy: Any) -> dict[str, Tensor]:
    theirs, ours = policy.state_dict(), {}
    for part in ("weight", "bias"):
        for layer in (0, 2):
            ours[f"actor.trunk.{layer}.{part}"] = theirs[f"actor.latent_pi.{layer}.{part}"].clone()
        ours[f"actor.action_head.head.{part}"] = torch.cat(
            (theirs[f"actor.mu.{part}"], theirs[f"actor.log_std.{part}"])
        )
        for name, their_name in (("critics", "critic"), ("target_critics", "critic_target")):
            for layer in (0, 2, 4):
                parts = [theirs[f"{their_name}.qf{k}.{layer}.{part}"] for k in (0, 1)]
                ours[f"{name}.layers.{layer}.{part}"] = torch.stack(
                    [value.T if part == "weight" else value[None] for value in parts]
                )
    return ours


def test_sac_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    from stable_baselines3.common.logger import Logger

    num_updates, batch_size = 5, 64
    draws = torch.Generator().manual_seed(1)
    names = ("observations", "actions", "next_observations", "rewards", "dones")
    batches = []
    for _ in range(num_updates):
        obs, next_obs = (torch.randn(batch_size, 3, generator=draws) for _ in range(2))
        action, reward = torch.rand(batch_size, 1, generator=draws) * 2 - 1, torch.randn(batch_size, 1, generator=draws)
        done = (torch.rand(batch_size, 1, generator=draws) < 0.1).float()
        batches.append(dict(zip(names, (obs, action, next_obs, reward, done), strict=True)))
    noise = [torch.randn(batch_size, 1, generator=draws) for _ in range(2 * num_updates)]

    model = sb3.SAC(
        "MlpPolicy", "Pendulum-v1", learning_rate=1e-3, buffer_size=100, batch_size=batch_size, seed=0, device="cpu",
        policy_kwargs={"net_arch": [32, 32]},
    )  # fmt: skip
    model.set_logger(Logger(None, []))
    env = make_env("Pendulum-v1", 1)
    hidden = {"hidden_dims": (32, 32)}
    policy = SACPolicy.for_env(env, actor_cfg=hidden, critic_cfg=hidden)
    policy.load_state_dict(sac_weights(model.policy), strict=False)
    cfg = SACConfig(learning_rate=1e-3, batch_size=batch_size, learning_starts=0, utd_ratio=1.0)
    algorithm = SAC(policy=policy, cfg=cfg)
    rollout = SyncCollector(env, policy, keep=SAC.required_keys, seed=0).collect(num_updates)
    drawn = iter(
        {
            "observation": batch["observations"],
            "action": 2.0 * batch["actions"],  # theirs are scaled to [-1, 1]
            "reward": batch["rewards"],
            "next_observation": batch["next_observations"],
            "discount": 0.99 * (1.0 - batch["dones"]),
            "weight": torch.ones(batch_size, 1),
            "index": torch.zeros(batch_size, dtype=torch.long),
        }
        for batch in batches
    )
    before = sac_weights(model.policy)

    class Samples:
        """Hands out the batches in turn."""

        def __init__(self) -> None:
            self.next = iter(batches)

        def sample(self, *_: Any, **__: Any) -> Any:
            return SimpleNamespace(**next(self.next), discounts=None)

    model.replay_buffer = Samples()
    # They draw the action of the state first, then that of its successor; ours the other way round.
    theirs, ours = iter(noise), iter([noise[i + 1 - 2 * (i % 2)] for i in range(len(noise))])
    with monkeypatch.context() as patched:
        patched.setattr(torch.distributions.Normal, "rsample", lambda self, *_: self.loc + self.scale * next(theirs))
        model.train(num_updates, batch_size)
        patched.setattr(torch, "randn_like", lambda _: next(ours))
        patched.setattr(algorithm.replay, "sample", lambda *_, **__: next(drawn))
        assert algorithm.update(rollout)["updates"] == num_updates
    after, now = sac_weights(model.policy), policy.state_dict()
    assert gap(before, after) > 1e-3
    # Their log-probability has 1e-6 inside a logarithm, ours is exact; Adam enlarges that where gradients vanish.
    assert gap({name: now[name] for name in after}, after) < 1e-4
    assert float(algorithm.log_temperature.detach()) == pytest.approx(float(model.log_ent_coef.detach()), abs=1e-6)


def test_log_probabilities_of_squashed_actions() -> None:
    from stable_baselines3.common.distributions import SquashedDiagGaussianDistribution

    mean, log_std = torch.randn(100, 3), 0.3 * torch.randn(100, 3)
    theirs = SquashedDiagGaussianDistribution(3).proba_distribution(mean, log_std)
    ours = SquashedGaussian(mean, log_std, -torch.ones(3), torch.ones(3))
    action, log_prob = ours.sample_with_log_prob()
    inside = (action.abs() < 0.99).all(-1)
    torch.testing.assert_close(log_prob[inside, 0], theirs.log_prob(action)[inside], atol=1e-3, rtol=1e-3)


def test_scaled_rewards_are_those_of_vec_normalize() -> None:
    import gymnasium as gym
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    env = VecNormalize(DummyVecEnv([lambda: gym.make("Pendulum-v1", max_episode_steps=70)] * 2), gamma=0.9)
    env.seed(0)
    env.reset()
    raw, scaled, done = [], [], []
    rng = np.random.default_rng(0)
    for _ in range(300):
        _, reward, ends, _ = env.step(rng.uniform(-2, 2, (2, 1)).astype(np.float32))
        raw.append(env.get_original_reward())
        scaled.append(reward)
        done.append(ends)
    reward, ends = torch.as_tensor(np.stack(raw)).unsqueeze(-1), torch.as_tensor(np.stack(done)).unsqueeze(-1)
    scaler = RewardScaler(0.9)
    scaler(reward[:50], ends[:50])  # our first batch knows all of its returns; theirs begins with the first
    ours = scaler(reward[50:], ends[50:])
    torch.testing.assert_close(ours.squeeze(-1), torch.as_tensor(np.stack(scaled[50:])), rtol=1e-4, atol=0)
    assert scaler.statistics.var.item() == pytest.approx(env.ret_rms.var, rel=1e-4)
