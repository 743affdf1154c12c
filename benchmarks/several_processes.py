"""Learning in several processes comes to the same as in one, and as when a process is killed in the middle.

    python benchmarks/several_processes.py [--seeds 0,1,2]

``lift_ppo`` in one process, and in two under torchrun with the same total batch. PPO on FetchReachDense-v4 with two Ray
workers, and the same with ``kill -9`` of one of them half-way. Every run is a command of its own; scores are its last
evaluation.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import report

from apexrl.core.system.files import read_json_lines

ALONE = [sys.executable, "-m", "apexrl.cli"]
TOGETHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "apexrl.cli"]
QUIET = {"features.save_video": "false", "features.save_plot": "false", "logging.tensorboard": "false"}
LIFT = {"training.total_timesteps": "400000", "training.final_eval_episodes": "100"}
FETCH = {
    "task.id": "FetchReachDense-v4",
    "task.num_envs": "8",
    "algo.num_steps": "64",
    "algo.num_epochs": "10",
    "algo.num_minibatches": "8",
    "algo.learning_rate": "0.001",
    "algo.gamma": "0.95",
    "algo.schedule": "linear",
    "policy.normalize_obs": "true",
    "training.collector": "ray",
    "training.num_collectors": "2",
    "training.total_timesteps": "40960",
    "training.eval_interval": "0",
    "training.final_eval_episodes": "100",
}
CASES: dict[str, tuple[list[str], str, dict[str, str]]] = {
    "lift, one process": (ALONE, "lift_ppo", LIFT),
    "lift, two processes": (TOGETHER, "lift_ppo", LIFT),
    "Fetch, two Ray workers": (ALONE, "halfcheetah_ppo", FETCH),
    "Fetch, one of them killed": (ALONE, "halfcheetah_ppo", FETCH),
}


def train(case: str, seed: int, directory: Path) -> dict[str, Any]:
    program, preset, options = CASES[case]
    run_dir = directory / f"{len(list(directory.iterdir()))}"
    words = [word for name, value in {**options, **QUIET}.items() for word in (f"--{name}", value)]
    command = [*program, "train", preset, "--training.seed", str(seed), "--run-dir", str(run_dir), *words]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        if case.endswith("killed"):
            kill_a_worker(process, run_dir / "metrics.jsonl", int(options["training.total_timesteps"]) // 2)
    if process.returncode:
        sys.exit(f"{case}, seed {seed} ended with {process.returncode}: {' '.join(command)}")
    last, metrics = read_json_lines(run_dir / "evaluations.jsonl")[-1], read_json_lines(run_dir / "metrics.jsonl")
    row = {
        "case": case,
        "seed": seed,
        "return": last["return"],
        "success": last["success_once"],
        "steps": metrics[-1]["total_steps"],
        "lost_rollouts": metrics[-1].get("collect/lost_rollouts", 0.0),
        "curve": [[line["total_steps"], line["rollout/return"]] for line in metrics if "rollout/return" in line],
        "seconds": time.perf_counter() - started,
    }
    print(
        f"{case:28} seed {seed}  return {row['return']:8.2f}  success {100 * row['success']:5.1f} %  "
        f"lost rollouts {row['lost_rollouts']:.0f}  {row['seconds']:4.0f} s",
        flush=True,
    )
    return row


def kill_a_worker(process: subprocess.Popen[bytes], metrics: Path, steps: int) -> None:
    """Wait until a run has taken some steps, and kill one of its Ray workers while it collects."""
    while process.poll() is None:
        lines = read_json_lines(metrics) if metrics.exists() else []
        workers = [pid for pid in descendants(process.pid) if cmdline(pid).startswith(b"ray::_Worker")]
        if workers and lines and lines[-1]["total_steps"] >= steps:
            os.kill(workers[0], signal.SIGKILL)
            return
        time.sleep(0.05)


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def descendants(pid: int) -> list[int]:
    try:
        children = [
            int(word)
            for path in Path(f"/proc/{pid}/task").iterdir()
            for word in (path / "children").read_text().split()
        ]
    except OSError:
        return []
    return [*children, *(below for child in children for below in descendants(child))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", default="", help="cases that begin so; writes nothing")
    options = parser.parse_args()
    cases = [case for case in CASES if case.startswith(options.only)]
    with tempfile.TemporaryDirectory() as directory:
        seeds = [int(seed) for seed in options.seeds.split(",")]
        rows = [train(case, seed, Path(directory)) for case in cases for seed in seeds]
    for case in cases:
        returns = np.array([row["return"] for row in rows if row["case"] == case])
        error = returns.std(ddof=1) / len(returns) ** 0.5 if len(returns) > 1 else float("nan")
        print(f"{case:28} mean return {returns.mean():8.2f}, standard error {error:.2f}, {len(returns)} seeds")
    if not options.only:
        print(f"wrote {report.write('several_processes', {'rows': rows})}")


if __name__ == "__main__":
    main()
