"""From one demonstration to a solved task: imitation, then RLOO from success alone, on three tasks of Meta-World.

    python benchmarks/ript_one_task.py [--seeds 0,1,2] [--tasks reach-v3,...] [--iterations N] [--jobs 2]
    python benchmarks/ript_one_task.py --draw docs/images/ript_one_task.png    shows and draws what was measured last

Each task has one demonstration, by its scripted expert from the first training state, the same for all seeds. BC learns
it, then RLOO has ``ITERATIONS`` iterations: once with the group as baseline, and once, from the same start, with the
whole batch, nothing else different. Success is that of the policy's mode from the 50 validation states, on which
nothing was trained. A seed changes the first weights, the minibatches, the order of initial states and the sampling.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import resource
import tempfile
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import report

from apexrl.agent.loggers import Logger
from apexrl.collectors.demonstrations.record import record_demos
from apexrl.core.functional.intervals import wilson_interval
from apexrl.envs.suites import make_suite
from apexrl.evaluation.evaluate import EvaluationResult
from apexrl.run.config import Config, make_config
from apexrl.run.directory import start

NAME = "ript_one_task"
ITERATIONS, EVALUATE_EVERY, EPISODES, GOAL = 15, 3, 50, 0.9
BASELINES = {"group": "group-wise RLOO", "batch": "whole-batch baseline"}
TASK: dict[str, Any] = {"num_parallel_envs": 32, "num_workers": 0, "max_episode_length": 150, "chunk_size": 5}
POLICY: dict[str, Any] = {
    "kind": "mlp",
    "hidden_dims": [256, 256],
    "actor_groups": ["state"],
    "critic_groups": ["state"],
    "init_std": 1.0,
    "normalize_obs": True,
}
BC: dict[str, Any] = {"name": "bc", "num_updates": 1500}
RLOO: dict[str, Any] = {
    "name": "rloo",
    "rloo_batch_size": 8,
    "num_groups": 24,
    "oversample": 1.0,
    "max_attempts": 1,
    "enable_rollout_stats_tracking": False,
    "num_epochs": 8,
    "learning_rate": 5e-4,
    "clip_coef": 0.6,
    "collapse_ratio": 0.3,
}
DIFFERENCES: dict[str, dict[str, dict[str, Any]]] = {
    "reach-v3": {
        "task": {"max_episode_length": 80},
        "bc": {"min_std": 0.2},
        "rloo": {"num_groups": 30, "learning_rate": 7e-4},
    },
    "window-open-v3": {},
    "drawer-open-v3": {},
}
"""Of each task from the settings above."""


class Curve(Logger):
    """Keeps what an image and a table need of every iteration."""

    names = {  # noqa: RUF012
        "iteration": "iteration",
        "steps": "total_steps",
        "sampled": "rollout/success_rate",
        "held_out": "eval/success_rate",
        "mixed_groups": "collect/groups_valid",
        "clip_frac": "train/clip_frac",
        "approx_kl": "train/approx_kl",
        "collapsed": "train/collapsed",
    }

    def __init__(self) -> None:
        self.points: list[dict[str, float]] = []

    def log(self, values: Mapping[str, float]) -> None:
        self.points.append({short: round(values[name], 4) for short, name in self.names.items() if name in values})


Sections = Mapping[str, Mapping[str, Any]]


def config_of(task: str, algo: str, *changes: Sections) -> Config:
    """Return the configuration of BC or RLOO on a task; changes are by section, of which algo is called bc or rloo."""
    raw: dict[str, dict[str, Any]] = {
        "task": {"benchmark_name": f"metaworld:{task}", **TASK},
        "policy": dict(POLICY),
        "algo": dict(BC if algo == "bc" else RLOO),
        "training": {"device": "cpu", "num_threads": 1, "eval_episodes": EPISODES, "eval_num_envs": 25},
        "logging": {"tensorboard": False, "log_interval": 100 if algo == "bc" else 1},
    }
    for more in (DIFFERENCES[task], *changes):
        for section, fields in more.items():
            if section not in ("bc", "rloo") or section == algo:
                raw["algo" if section == algo else section].update(fields)
    return make_config(raw)


def one_run(task: str, seed: int, baseline: str, iterations: int, demos: str, changes: Sections) -> dict[str, Any]:
    """Imitate, then train with RLOO; returns a row with the held-out successes and the curve."""
    warnings.filterwarnings("ignore")
    logging.getLogger("apexrl").setLevel(logging.ERROR)  # which groups were dropped
    started = time.perf_counter(), time.process_time()
    curve = Curve()
    with tempfile.TemporaryDirectory() as directory:
        bc = Path(directory) / "bc"
        imitation: Sections = {"task": {"demos": demos}, "training": {"seed": seed}}
        trainer = start(config_of(task, "bc", changes, imitation), bc)
        trainer.learn()
        trainer.close()
        bc_cpu_seconds = time.process_time() - started[1]
        schedule = {"num_train_steps": iterations, "eval_interval": EVALUATE_EVERY, "init_from": str(bc)}
        rest: Sections = {"rloo": {"baseline": baseline}, "training": {"seed": seed, **schedule}}
        trainer = start(config_of(task, "rloo", changes, rest), Path(directory) / "rloo", [curve])
        before = trainer.evaluate(EPISODES)
        trainer.learn()
        after, sampled = trainer.evaluate(EPISODES), trainer.evaluate(EPISODES, deterministic=False)
        steps = trainer.total_steps
        trainer.close()
    return {
        "task": task,
        "seed": seed,
        "baseline": baseline,
        "bc": success(before),
        "final": success(after),
        "final_sampled": success(sampled),
        "steps": steps,
        "bc_cpu_seconds": round(bc_cpu_seconds, 1),
        "cpu_seconds": round(time.process_time() - started[1], 1),
        "seconds": round(time.perf_counter() - started[0], 1),
        "curve": curve.points,
    }


def success(result: EvaluationResult) -> int:
    """Count the successes among the episodes."""
    return round(result.mean("success_once") * result.num_episodes)


def measure(tasks: list[str], seeds: list[int], iterations: int, jobs: int) -> dict[str, Any]:
    """Run the whole table, ``jobs`` runs side by side with one thread each."""
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as demos:
        for task in tasks:
            record_demos(make_suite(f"metaworld:{task}"), demos, per_task=1)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, context, max_tasks_per_child=1) as pool:
            runs = [
                pool.submit(one_run, task, seed, baseline, iterations, demos, {})
                for seed in seeds
                for task in tasks
                for baseline in BASELINES
            ]
            for future in as_completed(runs):
                row = future.result()
                rows.append(row)
                print(
                    f"{row['task']:16} seed {row['seed']}, {BASELINES[row['baseline']]:20} BC {row['bc']:2} -> "
                    f"{row['final']:2} of {EPISODES}, {row['steps']:7,} steps, {row['cpu_seconds']:.0f} s of CPU, "
                    f"{row['seconds']:.0f} s",
                    flush=True,
                )
    order = {task: number for number, task in enumerate(tasks)}
    rows.sort(key=lambda row: (order[row["task"]], row["baseline"] != "group", row["seed"]))
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "iterations": iterations,
        "episodes": EPISODES,
        "seeds": seeds,
        "jobs": jobs,
        "settings": {task: {algo: config_of(task, algo).to_dict() for algo in ("bc", "rloo")} for task in tasks},
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime, 1),
        "rows": rows,
    }


def pooled(rows: list[dict[str, Any]], what: str) -> tuple[float, float, float]:
    """Return the mean success over the seeds, and Wilson's 95 % interval of all their episodes together."""
    successes, count = sum(row[what] for row in rows), len(rows) * EPISODES
    return successes / count, *wilson_interval(successes, count)


def of(record: Mapping[str, Any], task: str, baseline: str) -> list[dict[str, Any]]:
    """Return the rows of a task and baseline."""
    return [row for row in record["rows"] if row["task"] == task and row["baseline"] == baseline]


def show(record: Mapping[str, Any]) -> None:
    """Print the table."""
    print(f"held-out success over {EPISODES} states and seeds {record['seeds']}, {record['iterations']} iterations:")
    print(f"{'task':16} {'BC':28} {BASELINES['group']:28} {BASELINES['batch']:28} steps")
    for task in record["settings"]:
        group, batch = of(record, task, "group"), of(record, task, "batch")
        cells = []
        for rows, what in ((group, "bc"), (group, "final"), (batch, "final")):
            mean, low, high = pooled(rows, what)
            each = ", ".join(str(round(100 * row[what] / EPISODES)) for row in rows)
            cells.append(f"{100 * mean:3.0f} % [{100 * low:.0f}, {100 * high:.0f}] ({each})")
        steps = np.mean([row["steps"] for row in group])
        reached = "" if pooled(group, "final")[0] >= GOAL else f"   below {GOAL:.0%}"
        print(f"{task:16} {cells[0]:28} {cells[1]:28} {cells[2]:28} {steps:,.0f}{reached}")
    seconds = [row["cpu_seconds"] for row in record["rows"]]
    print(
        f"a run {min(seconds):.0f} to {max(seconds):.0f} s of CPU; whole table {record['cpu_seconds'] / 60:.1f} min of "
        f"CPU, {record['seconds'] / 60:.1f} min with {record['jobs']} at a time"
    )


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw the curves of both baselines, a panel for each task."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    tasks = list(record["settings"])
    figure, axes = plt.subplots(1, len(tasks), figsize=(4.6 * len(tasks), 3.8), sharey=True, squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for color, (baseline, label) in zip(("C0", "C1"), BASELINES.items(), strict=True):
            rows = of(record, task, baseline)
            held_out = np.array(
                [
                    [row["bc"] / EPISODES, *(point["held_out"] for point in row["curve"] if "held_out" in point)]
                    for row in rows
                ]
            )
            x = [0, *(point["iteration"] for point in rows[0]["curve"] if "held_out" in point)]
            axis.plot(x, held_out.mean(0), color=color, marker="o", markersize=3, label=f"{label}, held out")
            axis.fill_between(x, held_out.min(0), held_out.max(0), color=color, alpha=0.15, linewidth=0)
            sampled = np.array([[point["sampled"] for point in row["curve"]] for row in rows])
            # The batch of iteration i was sampled by the policy that i - 1 updates made.
            axis.plot(range(sampled.shape[1]), sampled.mean(0), color=color, linestyle=":", label=f"{label}, sampled")
        start = pooled(of(record, task, "group"), "bc")[0]
        axis.axhline(start, color="gray", linewidth=1, linestyle="--")
        axis.plot(0, start, marker="*", markersize=12, color="black", linestyle="", label="BC, one demonstration")
        axis.axhline(GOAL, color="gray", linewidth=0.5)
        axis.set(title=task, xlabel="iteration", ylim=(0, 1.02))
    axes[0][0].set_ylabel(f"success (mean and range of {len(record['seeds'])} seeds)")
    axes[0][-1].legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--tasks", default=",".join(DIFFERENCES))
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    parser.add_argument("--draw", type=Path, help="show and draw into this file what was measured last")
    options = parser.parse_args()
    path = Path(__file__).parent / f"{NAME}.json"
    if options.draw:
        record = json.loads(path.read_text())
        draw(record, options.draw)
    else:
        seeds = [int(seed) for seed in options.seeds.split(",")]
        record = measure(options.tasks.split(","), seeds, options.iterations, options.jobs)
        print(f"wrote {report.write(NAME, record)}")
    show(record)


if __name__ == "__main__":
    main()
