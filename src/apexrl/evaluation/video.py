"""Videos of a policy."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch

from apexrl.core.errors import RunDirError
from apexrl.core.types import OBSERVATION, Carry
from apexrl.envs.base import VecEnv
from apexrl.policies.base import Policy
from apexrl.rollout import evaluation_mode, initial_state, make_actor, rollout


def record_video(
    env: VecEnv, policy: Policy, path: Path, *, seed: int = 0, num_episodes: int = 1, fps: float | None = None
) -> Path:
    """Play deterministic episodes in environment 0, one after another, and write its images as an MP4 file.

    The policy acts with the mode of its distribution. With ``fps`` frames per second every step is shown, else it is
    real time with about 30.
    """
    import imageio.v2 as imageio

    seconds, rate = env.step_time()
    rate = 1.0 / seconds if seconds else rate or env.video_fps
    every = 1 if fps else max(1, round(rate / 30.0))
    steps = itertools.count()

    actor = make_actor(policy, env.device, deterministic=True)
    temporary = path.with_suffix(".part.mp4")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()  # where it cannot be written, ffmpeg would fail with a page of text
    except OSError as error:
        raise RunDirError(f"{path} cannot be written: {error.strerror}. Name another place.") from error
    writer: Any

    def act_and_render(carry: Carry) -> dict[str, torch.Tensor]:
        if next(steps) % every == 0:
            writer.append_data(env.render(0))
        return actor(carry)

    try:
        with (
            evaluation_mode(policy, seed),
            imageio.get_writer(temporary, fps=fps or rate / every, macro_block_size=2) as writer,
        ):
            carry: Carry = {OBSERVATION: env.reset(seed=seed), **initial_state(policy, env)}
            for _ in range(num_episodes):
                _, carry = rollout(env, act_and_render, carry, env.max_episode_steps or 1000, keep=(), until_done=True)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
