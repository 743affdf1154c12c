"""Short runs of every kind of policy, for tests of what is done with a trained one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from apexrl.run import directory as run
from apexrl.run.loading import load_config

FEW = {
    "task.num_envs": "4",
    "policy.hidden_dims": "[16, 16]",
    "training.total_timesteps": "64",  # a new normaliser takes the first half
    "training.eval_interval": "0",
    "training.device": "cpu",
    "logging.tensorboard": "false",
}
ON_POLICY = {"algo.num_steps": "8", "algo.num_epochs": "1", "algo.num_minibatches": "2"}
CAMERA = spaces.Box(0, 255, (16, 16, 3), np.uint8)
GROUPS = spaces.Dict(
    {
        "robot": spaces.Dict({"joints": spaces.Box(-1, 1, (2,)), "gripper": spaces.Box(0, 1, ())}),
        "camera": CAMERA,
        "priv": spaces.Box(-1, 1, (3,)),
    }
)


class Cameras(gym.Env[Any, Any]):
    """Random observations: named groups with an image and a privileged group, or the image alone."""

    def __init__(self, only_image: bool = False) -> None:
        self.observation_space = CAMERA if only_image else GROUPS
        self.action_space = spaces.Box(np.array([-0.3, -0.4], np.float32), np.array([0.3, 0.1], np.float32))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 0.0, False, False, {}


class Switches(gym.Env[Any, Any]):
    """Two choices at once, counted from 1 and from 0."""

    observation_space = spaces.Box(-1, 1, (3,))
    action_space = spaces.MultiDiscrete([3, 4], start=[1, 0])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), 0.0, False, False, {}


gym.register("apexrl-tests/Switches-v0", lambda **kwargs: Switches(**kwargs), max_episode_steps=20)
gym.register("apexrl-tests/Cameras-v0", lambda **kwargs: Cameras(**kwargs), max_episode_steps=20)

KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "lift": ("lift_ppo", {"policy.normalize_obs": "true", **ON_POLICY}),
    "cartpole": ("cartpole_ppo", ON_POLICY),
    "switches": ("lift_ppo", {"task.id": "apexrl-tests/Switches-v0", **ON_POLICY}),
    "gsde": ("lift_ppo", {"policy.gsde": "true", "policy.init_std": "0.2", **ON_POLICY}),
    "groups": ("lift_ppo", {"task.id": "apexrl-tests/Cameras-v0", "policy.normalize_obs": "true", **ON_POLICY}),
    "image": (
        "lift_ppo",
        {"task.id": "apexrl-tests/Cameras-v0", "task.kwargs.only_image": "true", **ON_POLICY},
    ),
    "gru": (
        "lift_ppo",
        {
            "policy.kind": "gru",
            "policy.rnn_hidden_dim": "12",
            "policy.normalize_obs": "true",
            "task.kwargs.max_episode_steps": "40",
            **ON_POLICY,
            "algo.num_minibatches": "1",
        },
    ),
    "gru on groups": ("lift_ppo", {"task.id": "apexrl-tests/Cameras-v0", "policy.kind": "gru", **ON_POLICY}),
    "sac": ("pendulum_sac", {"policy.normalize_obs": "true", "algo.batch_size": "8", "algo.learning_starts": "16"}),
    **{
        f"roa {kind}": (
            "payload_roa",
            {
                "policy.history_kind": kind,
                "policy.adapt_dims": "[16]",
                "policy.normalize_obs": "true",
                **ON_POLICY,
                "algo.num_steps": "32",  # longer than the window, so that every frame in it has varied
                "training.total_timesteps": "256",
            },
        )
        for kind in ("mlp", "conv", "gru")
    },
}


def saved_run(directory: Path, kind: str, **more: str) -> Path:
    """A run of an iteration or two, whose weights are then stirred so that actions are large and all layers count."""
    preset, overrides = KINDS[kind]
    trainer = run.start(load_config(preset, list({**FEW, **overrides, **more}.items())), directory)
    trainer.learn()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in trainer.policy.parameters():
            # Larger biases would make the same choice everywhere.
            parameter.add_((0.1 if parameter.ndim > 1 else 0.02) * torch.randn_like(parameter))
    trainer.save_checkpoint()
    trainer.close()
    return directory
