"""Whole runs by the clock, without flags for speed: ours and Stable-Baselines3, in turns.

    python benchmarks/default_speed.py [--only CASE,…] [--rounds 3] [--quick]

From the start of the interpreter to its end, with imports and compilation, without evaluation and video, on one thread.
Cold runs find no compiled code, warm ones that of the cold run just before. The ratio is of the medians over rounds.
With --only the record keeps its rows of other cases.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report


@dataclass(frozen=True)
class Case:
    preset: str
    """Of ours; it names the algorithm."""
    task: str
    steps: int
    options: dict[str, Any]
    """Of ours, ``section.key``."""
    peer: dict[str, Any]
    """Keyword arguments of the peer's algorithm, which ask for the same work."""
    num_envs: int = 1
    kinds: tuple[str, ...] = ("cold", "warm")


CHEETAH_OPTIONS = {"algo.num_steps": 256}
CHEETAH_PEER = {"n_steps": 256, "batch_size": 64, "n_epochs": 10}
CARTPOLE_PEER = {"n_steps": 128, "batch_size": 128, "n_epochs": 10}
SAC_OPTIONS = {
    "algo.batch_size": 256, "algo.learning_starts": 100, "algo.utd_ratio": 1.0, "algo.num_steps": 4,
    "policy.hidden_dims": [256, 256],
}  # fmt: skip
SAC_PEER = {"batch_size": 256, "learning_starts": 100, "train_freq": 4, "gradient_steps": 4}
CASES = {
    "cheetah_100k": Case("halfcheetah_ppo", "HalfCheetah-v5", 100_000, CHEETAH_OPTIONS, CHEETAH_PEER, 8),
    "cheetah_300k": Case("halfcheetah_ppo", "HalfCheetah-v5", 300_000, CHEETAH_OPTIONS, CHEETAH_PEER, 8),
    "cartpole": Case("cartpole_ppo", "CartPole-v1", 100_000, {}, CARTPOLE_PEER, 8),
    "sac_pendulum": Case("pendulum_sac", "Pendulum-v1", 20_000, SAC_OPTIONS, SAC_PEER),
    "sac_cheetah": Case("halfcheetah_sac", "HalfCheetah-v5", 20_000, SAC_OPTIONS, SAC_PEER),
}
WITHOUT_EVALUATION = {
    "training.eval_interval": 0, "training.final_eval_episodes": 0, "features.save_video": "false",
}  # fmt: skip


def command(case: Case, run_dir: Path, steps: int) -> list[str]:
    options = {"training.total_timesteps": steps, "task.id": case.task, "task.num_envs": case.num_envs}
    words = [f"--{key}={value}" for key, value in {**options, **WITHOUT_EVALUATION, **case.options}.items()]
    return [sys.executable, "-m", "apexrl.cli", "train", case.preset, "--run-dir", str(run_dir), *words]


def peer(name: str, steps: int) -> None:
    """Train with Stable-Baselines3 in this process."""
    import stable_baselines3
    import torch
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    case = CASES[name]
    env = make_vec_env(case.task, n_envs=case.num_envs, seed=0)
    algorithm = stable_baselines3.SAC if case.preset.endswith("sac") else stable_baselines3.PPO
    algorithm("MlpPolicy", env, device="cpu", seed=0, **case.peer).learn(steps)


def timed(words: list[str], cache: Path, log: Path) -> tuple[float, float]:
    """Run a command; return its seconds by the clock, and of processor time with its children."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
    }  # fmt: skip
    before, started = os.times(), time.perf_counter()
    with log.open("w") as file:
        subprocess.run(words, env=environment, stdout=file, stderr=subprocess.STDOUT, check=True)
    seconds, after = time.perf_counter() - started, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, used


def measure(name: str, rounds: int, steps: int, scratch: Path) -> list[dict[str, Any]]:
    case = CASES[name]
    times: dict[str, list[tuple[float, float]]] = {"Stable-Baselines3": []}
    for number in range(rounds):
        cache = scratch / f"{name}{number}_cache"
        order = ["Stable-Baselines3", *case.kinds]
        for kind in order:
            if kind == "Stable-Baselines3":
                words = [sys.executable, __file__, "--peer", name, "--steps", str(steps)]
            else:
                words = command(case, scratch / f"{name}{number}_{kind}", steps)
            clock, processor = timed(words, cache, scratch / "log")
            times.setdefault(kind, []).append((clock, processor))
            print(f"{name:14} round {number} {kind:18} {clock:7.1f} s, {processor:7.1f} s of processor", flush=True)
    rows: list[dict[str, Any]] = []
    for kind, found in times.items():
        clock = statistics.median(seconds for seconds, _ in found)
        processor = statistics.median(used for _, used in found)
        row = {"case": name, "task": case.task, "steps": steps, "kind": kind, "seconds": [s for s, _ in found]}
        row |= {"median": clock, "processor": processor}
        if rows:
            row |= {"ratio": rows[0]["median"] / clock, "processor_ratio": rows[0]["processor"] / processor}
            print(f"{name:14} {kind:18} {clock:7.1f} s {row['ratio']:5.2f} x ({row['processor_ratio']:.2f} x)")
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cases, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps: for a look, not for a figure")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        peer(options.peer, options.steps)
        return
    names = options.only.split(",") if options.only else list(CASES)
    record = Path(__file__).with_suffix(".json")
    old = json.loads(record.read_text())["rows"] if options.only and record.exists() else []
    rows = [row for row in old if row["case"] not in names]
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            steps = CASES[name].steps // (10 if options.quick else 1)
            rows += measure(name, options.rounds, steps, Path(scratch))
    if not options.quick:
        rows.sort(key=lambda row: list(CASES).index(row["case"]))
        print(f"wrote {report.write('default_speed', {'rows': rows})}")


if __name__ == "__main__":
    main()
