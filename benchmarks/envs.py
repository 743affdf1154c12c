"""Steps a second of environments alone, without a policy.

    python benchmarks/envs.py [--quick] [--seconds 0.25] [--rounds 6]

MuJoCo tasks: Gymnasium's own in-process vector (sync), GymVecEnv, and MujocoVecEnv with one and two threads. The ways
take turns, and the fastest of its rounds counts for each, the one that other programs disturbed least. Ratios are to
Gymnasium's sync. The last column is time on all cores together, which other programs change little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import report
import torch

from apexrl.envs import GymVecEnv, MujocoVecEnv, make_env
from apexrl.envs.adapters.gymnasium import gym_make_fns

MUJOCO_TASKS = ("HalfCheetah-v5", "Ant-v5", "Humanoid-v5")
TENSOR_TASKS = ("cartpole", "pendulum", "lift")
SEED = 0


class Stepper(NamedTuple):
    """Something that can be timed."""

    step: Callable[[int], Any]
    """Takes the number of the step."""
    close: Callable[[], None]


class Speed(NamedTuple):
    """Steps a second and microseconds of processor time a step."""

    rate: float
    cpu_us: float


def random_actions(space: Any, num_envs: int, count: int = 64) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(SEED)
    if isinstance(space, gym.spaces.Discrete):
        return rng.integers(space.n, size=(count, num_envs, 1))
    return rng.uniform(space.low, space.high, (count, num_envs, *space.shape)).astype(np.float32)


def gymnasium_sync(task: str, num_envs: int) -> Stepper:
    env = gym.make_vec(task, num_envs, vectorization_mode="sync")
    actions = random_actions(env.single_action_space, num_envs)
    env.reset(seed=SEED)
    return Stepper(lambda t: env.step(actions[t % len(actions)]), env.close)


def ours(env: Any) -> Stepper:
    actions = torch.from_numpy(random_actions(env.action_space, env.num_envs))
    env.reset(seed=SEED)
    return Stepper(lambda t: env.step(actions[t % len(actions)]), env.close)


WAYS: dict[str, Callable[[str, int], Stepper]] = {
    "gymnasium sync": gymnasium_sync,
    "GymVecEnv": lambda task, n: ours(GymVecEnv(gym_make_fns(task, n))),
    "MujocoVecEnv, 1 thread": lambda task, n: ours(MujocoVecEnv(task, n, num_threads=1)),
    "MujocoVecEnv, 2 threads": lambda task, n: ours(MujocoVecEnv(task, n, num_threads=2)),
}


def time_steps(stepper: Stepper, num_envs: int, seconds: float) -> Speed:
    stepper.step(0)
    steps, started, cpu = 0, time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - started) < seconds:
        stepper.step(steps)
        steps += 1
    return Speed(steps * num_envs / elapsed, (time.process_time() - cpu) / (steps * num_envs) * 1e6)


def compare(steppers: dict[str, Stepper], num_envs: int, seconds: float, rounds: int) -> dict[str, Speed]:
    """Let the steppers take turns and return the fastest round of each."""
    found: dict[str, list[Speed]] = {name: [] for name in steppers}
    for _ in range(rounds):
        for name, stepper in steppers.items():
            found[name].append(time_steps(stepper, num_envs, seconds))
    for stepper in steppers.values():
        stepper.close()
    return {name: max(speeds) for name, speeds in found.items()}


def show(task: str, num_envs: int, speeds: dict[str, Speed]) -> list[dict[str, Any]]:
    """Print a line for each way and return the rows."""
    baseline = speeds.get("gymnasium sync")
    rows = []
    for way, speed in speeds.items():
        ratio = speed.rate / baseline.rate if baseline else None
        rows.append({"task": task, "num_envs": num_envs, "way": way, "steps_per_s": speed.rate, "ratio": ratio})
        rows[-1]["cpu_us_per_step"] = speed.cpu_us
        shown = f"{ratio:6.2f} x" if ratio is not None else " " * 8
        print(f"{task:16} {num_envs:5} {way:24} {speed.rate:12,.0f} {shown} {speed.cpu_us:10.2f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round, 8 environments only; writes no file")
    parser.add_argument("--seconds", type=float, default=0.25, help="of each round")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    seconds, rounds = (0.1, 1) if options.quick else (options.seconds, options.rounds)
    print(f"{'task':16} {'envs':>5} {'way':24} {'steps/s':>12} {'ratio':>8} {'cpu µs/step':>11}")
    rows: list[dict[str, Any]] = []
    for task in MUJOCO_TASKS:
        for num_envs in (8,) if options.quick else (8, 64):
            steppers = {name: make(task, num_envs) for name, make in WAYS.items()}
            rows += show(task, num_envs, compare(steppers, num_envs, seconds, rounds))
    for task in TENSOR_TASKS:
        steppers = {"tensor task": ours(make_env(task, 4096))}
        rows += show(task, 4096, compare(steppers, 4096, seconds, rounds))
    if not options.quick:
        print(f"wrote {report.write('envs', {'seed': SEED, 'seconds': seconds, 'rounds': rounds, 'rows': rows})}")


if __name__ == "__main__":
    main()
