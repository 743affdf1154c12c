"""Time of one ``predict`` beside that of Stable-Baselines3: a 64-64 network, one observation, one core.

Both policies are loaded from files, as a robot would load them, and called in turns, so that what else the machine does
touches both alike.

    python benchmarks/predict.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import write
from stable_baselines3 import PPO as SB3PPO

from apexrl import OnPolicyRunner, PPOConfig, load_policy, make_env

TASK = "Pendulum-v1"
ROUNDS, CALLS = 30, 500


def policies(directory: Path) -> dict[str, Any]:
    """Return both policies, saved and loaded; each has two layers of 64 units and tanh."""
    network = {"hidden_dims": (64, 64), "activation": "tanh"}
    runner = OnPolicyRunner(
        make_env(TASK, 2), actor_cfg=network, critic_cfg=network, cfg=PPOConfig(num_steps=8), device="cpu"
    )
    path = runner.save_checkpoint(directory / "apexrl.pt")
    SB3PPO("MlpPolicy", TASK, device="cpu").save(directory / "sb3.zip")
    return {"apexrl": load_policy(path), "stable-baselines3": SB3PPO.load(directory / "sb3.zip", device="cpu")}


def microseconds(predict: Callable[..., Any], observations: np.ndarray[Any, Any]) -> float:
    """Return what one call takes."""
    begin = time.perf_counter()
    for obs in observations:
        predict(obs, deterministic=True)
    return 1e6 * (time.perf_counter() - begin) / len(observations)


def main() -> None:
    """Measure, print and write."""
    torch.set_num_threads(1)
    observations = np.random.default_rng(0).uniform(-1, 1, (CALLS, 3)).astype(np.float32)
    with tempfile.TemporaryDirectory() as directory:
        found = policies(Path(directory))
    times: dict[str, list[float]] = {name: [] for name in found}
    for round_ in range(ROUNDS + 1):  # the first one warms up
        for name, policy in found.items():
            taken = microseconds(policy.predict, observations)
            if round_:
                times[name].append(taken)
    medians = {name: round(statistics.median(values), 1) for name, values in times.items()}
    ratio = round(medians["apexrl"] / medians["stable-baselines3"], 3)
    for name, median in medians.items():
        print(f"{name:20} {median:7.1f} microseconds per call (fastest round {min(times[name]):.1f})")
    print(f"ratio                {ratio:7.3f}")
    content = {"task": TASK, "network": [64, 64], "rounds": ROUNDS, "calls": CALLS}
    fastest = {name: round(min(values), 1) for name, values in times.items()}
    write("predict", {**content, "microseconds": medians, "fastest_round": fastest, "ratio": ratio})


if __name__ == "__main__":
    main()
