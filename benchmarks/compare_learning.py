"""Trains contenders from the same seeds and compares their returns; used by other benchmarks."""

from __future__ import annotations

import argparse
import multiprocessing
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import report
import torch

Contender = Callable[[int, int, int], tuple[float, float]]
"""Takes seed, environment steps and episodes; returns the mean return of the deterministic and of the drawn actions."""


def compare(
    name: str, task: str, steps: int, contenders: Mapping[str, Contender], description: str | None, words: list[str]
) -> None:
    """Read the options, run every contender from every seed, print the table, and write ``benchmarks/<name>.json``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, each on one thread")
    parser.add_argument("--only", choices=tuple(contenders), help="run one contender, write nothing")
    options = parser.parse_args(words)
    names = [options.only] if options.only else list(contenders)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    jobs = [(who, contenders[who], seed, options.steps, options.episodes) for who in names for seed in seeds]
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
        rows = pool.starmap(_run, jobs, chunksize=1)
    for who in names:
        mode, drawn = (np.array([row[key] for row in rows if row["library"] == who]) for key in ("return", "sampled"))
        error = mode.std(ddof=1) / len(mode) ** 0.5 if len(mode) > 1 else float("nan")
        print(
            f"{who:18} mean    return {mode.mean():8.1f} (standard error {error:.0f}), median {np.median(mode):8.1f}; "
            f"with sampled actions {drawn.mean():8.1f}; over {len(mode)} seeds"
        )
    if not options.only:
        print(f"wrote {report.write(name, {'task': task, 'steps': options.steps, 'rows': rows})}")


def _run(who: str, contender: Contender, seed: int, steps: int, episodes: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    started = time.perf_counter()
    result, sampled = contender(seed, steps, episodes)
    seconds = time.perf_counter() - started
    print(
        f"{who:18} seed {seed:2}  return {result:8.1f}  with sampled actions {sampled:8.1f}  {seconds:6.0f} s",
        flush=True,
    )
    return {"library": who, "seed": seed, "return": result, "sampled": sampled, "seconds": seconds}


def sb3_returns(model: Any, env: Any, seed: int, episodes: int) -> tuple[float, float]:
    """Evaluate a model of Stable-Baselines3 with its mode and with drawn actions."""
    from stable_baselines3.common.evaluation import evaluate_policy

    env.seed(seed + 1_000_003)
    mode, _ = evaluate_policy(model, env, episodes, deterministic=True)
    sampled, _ = evaluate_policy(model, env, episodes, deterministic=False)
    return float(np.mean(mode)), float(np.mean(sampled))
