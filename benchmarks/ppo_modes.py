"""Learning on ``lift`` in every way of running: eager, CUDA graphs, compiled, TF32, bf16; five seeds each.

    python benchmarks/ppo_modes.py [--seeds 0,1,2,3,4] [--draw docs/images/modes.png]

The preset ``lift_ppo``. None of the ways changes the mathematics, so their curves should differ by no more than seeds
do. Without CUDA only eager, compiled and bf16 run.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch

from apexrl.agent import Trainer, TrainingConfig
from apexrl.algorithms import PPO, PPOConfig
from apexrl.collectors import SyncCollector
from apexrl.core.system.acceleration import Acceleration
from apexrl.envs import make_env
from apexrl.run.build import make_policy
from apexrl.run.loading import load_config

MODES = {
    "eager": Acceleration(graphs=False),
    "graphs": Acceleration(),
    "compiled": Acceleration(compile=True),
    "TF32": Acceleration(precision="tf32"),
    "bf16": Acceleration(precision="bf16"),
    "bf16, compiled": Acceleration(compile=True, precision="bf16"),
}
NEEDS_CUDA = ("graphs", "TF32")


def train(acceleration: Acceleration, seed: int, device: torch.device) -> dict[str, Any]:
    """Train once; returns the curve of the success rate and a final evaluation."""
    config = load_config("lift_ppo")
    assert isinstance(config.algo, PPOConfig)
    acceleration.apply()
    torch.manual_seed(seed)
    env = make_env(config.task.id, config.task.num_envs, device=device)
    policy = make_policy(config.policy, env, device)
    algorithm = PPO(policy=policy, cfg=config.algo, acceleration=acceleration)
    collector = SyncCollector(env, policy, keep=PPO.required_keys, seed=seed, acceleration=acceleration)
    trainer = Trainer(env, policy, algorithm, TrainingConfig(seed=seed), collector=collector)
    curve: list[float] = []
    trainer.add_callback("post_iteration", lambda _, stats: curve.append(stats.get("rollout/success_rate", np.nan)))
    started = time.perf_counter()
    trainer.learn(config.training.total_timesteps)
    seconds = time.perf_counter() - started
    result = trainer.evaluate(100)
    trainer.close()
    half = next((i + 1 for i, rate in enumerate(curve) if rate >= 0.5), None)
    return {
        "seed": seed,
        "seconds": seconds,
        "return": float(result),
        "success": result.logs()["eval/success_rate"],
        "iterations_to_half": half,
        "curve": [None if np.isnan(rate) else round(rate, 4) for rate in curve],
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4))
    for index, mode in enumerate(dict.fromkeys(row["mode"] for row in rows)):
        curves = np.array([row["curve"] for row in rows if row["mode"] == mode], dtype=float)
        iterations = np.arange(1, curves.shape[1] + 1)
        with warnings.catch_warnings(action="ignore"):  # no episode has ended in the first iterations
            low, middle, high = np.nanmin(curves, 0), np.nanmean(curves, 0), np.nanmax(curves, 0)
        axis.plot(iterations, middle, color=f"C{index}", label=mode)
        axis.fill_between(iterations, low, high, color=f"C{index}", alpha=0.12, linewidth=0)
    axis.set(xlabel="iteration", ylabel="success rate in training", title="lift: mean and range over seeds")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--draw", type=Path, help="also draw the curves into this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    for mode, acceleration in MODES.items():
        if device.type == "cpu" and mode in NEEDS_CUDA:
            continue
        runs = [train(acceleration, int(seed), device) for seed in options.seeds.split(",")]
        rows += [{"mode": mode, **run} for run in runs]
        success, returns, half = (np.array([run[key] for run in runs], dtype=float) for key in
                                  ("success", "return", "iterations_to_half"))  # fmt: skip
        print(
            f"{mode:16} success {success.mean():.3f} ({success.min():.2f} to {success.max():.2f})  "
            f"return {returns.mean():7.2f} ± {returns.std(ddof=1):.2f}  "
            f"half success after {half.mean():.1f} ({half.min():.0f} to {half.max():.0f}) iterations  "
            f"{np.mean([run['seconds'] for run in runs]):.1f} s a run",
            flush=True,
        )
    print(f"wrote {report.write('ppo_modes', {'task': 'lift', 'rows': rows})}")
    if options.draw:
        draw(rows, options.draw)
        print(f"drew {options.draw}")


if __name__ == "__main__":
    main()
