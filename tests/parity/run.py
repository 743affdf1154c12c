"""Whether a refactor leaves training as it was: the same small runs with two commits on this machine, bit for bit.

    make parity BASE=main~3                     every case
    make parity BASE=main~3 CASES="lift gru"    some

A case runs twice with BASE. One that repeats itself there must give the same weights, optimizer, normaliser, generators
and logged metrics with the working tree, to the last bit; one that does not is compared by its mean reward.
Times, configurations and versions are left out. ``RENAMES`` maps names of BASE to those of
the working tree, ``FACTORS`` what had another unit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
RENAMES: tuple[tuple[str, str], ...] = ((r"\.pictures\.", ".images."),)
"""Regular expressions and what takes their place, for the paths of BASE's tensors and metrics."""
FACTORS: tuple[tuple[str, float, str, str], ...] = (
    (r"/train/value_loss$", 2.0, "core/functional/objectives.py", "0.5 * error.mean()"),
)
"""Metrics that are so many times what they were in a BASE whose file holds the text; exact for powers of two."""
LEFT_OUT = re.compile(
    r"(^|/)(config|recipe|format|spaces|stopped_by|versions?)(/|$)|^metrics/\d+/(time/|.*(_per_second$|/seconds))"
    # Terms log their value, and RLOO's imitation only where it is one; SAC's final exponent is always 1.
    r"|train/(imitation_loss|encoder_distance)$|/(final_importance|penalty_weight)$|/terms/"
)
COMMON = (
    "--training.device cpu --training.num_threads 1 --training.final_eval_episodes 0 --logging.tensorboard false "
    "--features.save_video false --features.save_plot false --features.compile false"
)
SUITE = (
    "stage11_ript_vla --task.benchmark_name metaworld:drawer-close-v3 --task.num_parallel_envs 8 --task.num_workers 0 "
    "--task.max_episode_length 120 --algo.imitation_updates 100 --algo.num_groups 4 --algo.collapse_ratio null "
    "--training.num_train_steps 2 --training.save_interval 1 --logging.log_freq 0"
)
TOLERANCE = 0.1
"""Relative difference of the mean reward that is allowed where BASE does not repeat itself."""


@dataclass(frozen=True)
class Case:
    """One small run."""

    words: str
    """What follows ``apexrl train``."""
    ranks: int = 1
    """Processes that learn together."""
    resume: bool = False
    """Delete all but the first checkpoint at the end, and resume from that."""


CASES = {
    "lift": Case("lift_ppo --task.num_envs 16 --training.total_timesteps 2560 --training.save_interval 2"),
    "gru": Case(
        "cartpole_ppo --task.id recall --task.num_envs 8 --policy.kind gru --training.total_timesteps 1500 "
        "--algo.num_steps 32 --algo.num_minibatches 4"
    ),
    "cnn": Case(
        "cartpole_ppo --task.id tests.parity.images:Dot-v0 --task.num_envs 4 --algo.num_steps 32 "
        "--training.total_timesteps 640"
    ),
    "roa_train": Case("payload_roa --task.num_envs 16 --algo.phase train --training.total_timesteps 2048"),
    "roa_both": Case(
        "payload_roa --task.num_envs 16 --policy.normalize_obs true --algo.encoder_penalty 0.1 "
        "--training.total_timesteps 2560"
    ),
    "sac": Case(
        "pendulum_sac --algo.num_steps 8 --algo.learning_starts 64 --training.total_timesteps 320 "
        "--training.eval_interval 0"
    ),
    "sac_per": Case(
        "pendulum_sac --algo.num_steps 8 --algo.learning_starts 64 --algo.priority_exponent 0.6 --algo.n_step 3 "
        "--training.total_timesteps 320 --training.eval_interval 0"
    ),
    "rloo_likelihood": Case(SUITE),
    "rloo_flow": Case(f"{SUITE} --policy.head flow --policy.denoising_steps 2"),
    "bc": Case(
        "mt10_bc --task.benchmark_name metaworld:reach-v3 --task.num_demos 1 --task.num_workers 0 --algo.num_updates 20"
    ),
    "async": Case(
        "lift_ppo --task.num_envs 16 --training.collector async --training.max_staleness 0 "
        "--training.total_timesteps 2560"
    ),
    "two_ranks": Case("lift_ppo --task.num_envs 16 --training.total_timesteps 2560", ranks=2),
    "workers": Case(
        "cartpole_ppo --task.num_envs 4 --task.num_workers 2 --algo.num_steps 32 --training.total_timesteps 640"
    ),
    "mujoco": Case(
        "halfcheetah_ppo --task.id mujoco/HalfCheetah-v5 --task.num_envs 4 --algo.num_steps 64 "
        "--algo.num_minibatches 4 --training.total_timesteps 1280"
    ),
    "resume": Case(
        "lift_ppo --task.num_envs 16 --algo.normalize_reward true --training.total_timesteps 3584 "
        "--training.save_interval 2 --training.keep_checkpoints 0",
        resume=True,
    ),
}


def run(case: Case, source: Path, run_dir: Path) -> None:
    """Train with the package in a source tree.

    Raises:
        RuntimeError: when a command fails.
    """
    launcher = [sys.executable, "-m"]
    if case.ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc_per_node={case.ranks}", "-m"]
    train = [*launcher, "apexrl.cli", "train"]
    _call([*train, *case.words.split(), *COMMON.split(), "--run-dir", str(run_dir)], source)
    if case.resume:
        for path in sorted((run_dir / "checkpoints").glob("iteration_*.pt"))[1:]:
            path.unlink()
        _call([*train, "--resume", str(run_dir)], source)


def _call(command: list[str], source: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=source, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")


def outcome(run_dir: Path) -> tuple[dict[str, str], float]:
    """Return a digest for the path of everything that must stay as it was, and the mean reward of the rollouts."""
    newest = max((run_dir / "checkpoints").glob("iteration_*.pt"))
    found = {path: digest(value) for path, value in _leaves(torch.load(newest, weights_only=True), "checkpoint")}
    rewards = []
    for number, line in enumerate((run_dir / "metrics.jsonl").read_text().splitlines()):
        metrics = json.loads(line)
        found.update({f"metrics/{number}/{name}": repr(value) for name, value in metrics.items()})
        rewards += [metrics["rollout/mean_reward"]] if "rollout/mean_reward" in metrics else []
    kept = {path: value for path, value in found.items() if not LEFT_OUT.search(path)}
    return kept, sum(rewards) / max(1, len(rewards))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}/{name}")
    else:
        yield path, value


def digest(value: Any) -> str:
    """Return what differs when a bit of a tensor, or a digit of a number, does."""
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
    if isinstance(value, list | tuple) and any(isinstance(inner, torch.Tensor) for inner in value):
        return " ".join(digest(inner) for inner in value)
    return repr(value)


def translated(found: Mapping[str, str], base: Path) -> dict[str, str]:
    """Give what BASE has the names and the units that it has now."""
    factors = [(path, factor) for path, factor, file, text in FACTORS if text in (base / "apexrl" / file).read_text()]
    return {_renamed(path): _scaled(path, value, factors) for path, value in found.items()}


def _scaled(path: str, value: str, factors: list[tuple[str, float]]) -> str:
    for pattern, factor in factors:
        value = repr(factor * float(value)) if re.search(pattern, path) else value
    return value


def _renamed(path: str) -> str:
    for old, new in RENAMES:
        path = re.sub(old, new, path)
    return path


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the paths that are missing, new or of another value."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def compare(name: str, base: Path, directory: Path) -> tuple[bool, str]:
    """Run a case with both commits; return whether it is as it was, and a line about it."""
    case = CASES[name]
    results = []
    for number, source in enumerate((base, base, ROOT / "src")):
        run(case, source, directory / f"{name}-{number}")
        results.append(outcome(directory / f"{name}-{number}"))
    (first, reward), (again, _), (now, reward_now) = results
    if unlike := differences(first, again):
        is_close = math.isclose(reward, reward_now, rel_tol=TOLERANCE)
        what = f"BASE differs from itself in {len(unlike)} of {len(first)}, such as {unlike[0]}"
        return is_close, f"{what}; mean reward {reward:.4g} before, {reward_now:.4g} now"
    if unlike := differences(translated(first, base), now):
        return False, f"{len(unlike)} of {len(first)} differ, such as {', '.join(unlike[:4])}"
    return True, f"bit-equal ({len(first)} values)"


def main() -> int:
    """Compare all cases; the exit code says whether all are as they were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a commit")
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all if not given")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if unknown := set(options.cases) - CASES.keys():
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        directory = Path(temporary)
        archive = subprocess.run(["git", "archive", options.base, "src"], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", temporary], input=archive.stdout, check=True)
        names = options.cases or list(CASES)
        verdicts = list(pool.map(lambda name: _verdict(name, directory / "src", directory), names))
    good = sum(verdicts)
    print(f"{good} of {len(verdicts)} cases are as they were.")
    return 0 if good == len(verdicts) else 1


def _verdict(name: str, base: Path, directory: Path) -> bool:
    try:
        is_same, text = compare(name, base, directory)
    except RuntimeError as error:  # and the other cases go on
        is_same, text = False, str(error)
    print(f"{'ok  ' if is_same else 'FAIL'} {name:16} {text}", flush=True)
    return is_same


if __name__ == "__main__":
    sys.exit(main())
