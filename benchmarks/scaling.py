"""How collecting with Ray scales: a small model, its inputs measured one by one, checked, and extrapolated.

    python benchmarks/scaling.py [--tasks waiting,gymnasium_robotics:FetchReachDense-v4] [--rounds 4] [--quick]
    python benchmarks/scaling.py --draw docs/images/scaling.png    shows and draws what was measured last

The model (``predict``) knows nothing of a run with Ray. Its inputs are the cost of an environment step, of the policy,
of a call and a byte through Ray, and of what the learner does with a rollout, each measured alone. It is then compared
with ``RayCollector`` with one and two workers, synchronous (``max_staleness=0``) and overlapped (1), and asked about a
cluster. Inputs and measurements take turns; the fastest round of each counts, and of an input the lower quartile of its
calls, so that other programs disturb little. The load is recorded. The task ``waiting`` needs hardly any processor, as
a robot does, or a simulator on another machine; two workers of the others need two free cores.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import report
import torch

from apexrl import PPO, ActorCritic, PPOConfig, make_env
from apexrl.collectors import SyncCollector
from apexrl.collectors.ray.collector import RayCollector
from apexrl.collectors.ray.session import RaySession, pack, side_by_side_arrays, weights_of
from apexrl.core.metrics import EpisodeMetrics, fold_episodes
from apexrl.core.types import NEXT_VALUE, VALUE, EnvStep, Observation
from apexrl.envs import VecEnv

FETCH = "gymnasium_robotics:FetchReachDense-v4"
WAITING = "waiting"
WAIT_SECONDS = 0.008
"""Of a step of all environments of the task ``waiting``."""
NUM_ENVS, NUM_STEPS = 8, 64
"""Of one worker, and of its rollouts."""
NETWORK = {"hidden_dims": (256, 256)}
CONFIG = PPOConfig(num_steps=NUM_STEPS, num_epochs=4, num_minibatches=8)
CLUSTER = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
"""Workers that the model is asked about."""
NETWORK_BANDWIDTH, NETWORK_LATENCY = 1.25e9, 1e-3
"""Bytes a second (10 Gbit/s) and seconds of a call between hosts, as assumed for the cluster."""
CAMERA_BYTES = 2 * 64 * 64 * 3
"""What two small cameras add to an environment step."""


@dataclass(frozen=True)
class Costs:
    """Inputs of the model, in seconds and bytes."""

    env_step: float
    """One step of one environment."""
    env_cpu: float
    """The same on the processor's clock: less, where the environment waits."""
    policy_step: float
    """One decision of the policy for all environments of a worker, and the storing of a step."""
    latency: float
    """One call of an actor."""
    bandwidth: float
    """Bytes a second into the learner's memory."""
    rollout_bytes: float
    """One rollout of a worker."""
    weight_bytes: float
    """The weights."""
    learner_rollout: float
    """What the learner does with each worker's rollout: join, value, count episodes."""
    learner_call: float
    """What the learner does once in a collection: publish the weights."""
    update_step: float = 0.0
    """Learning from one environment step; 0 to collect only."""
    num_envs: int = NUM_ENVS
    num_steps: int = NUM_STEPS


@dataclass(frozen=True)
class Prediction:
    """What the model says."""

    steps_per_s: float
    bottleneck: str
    seconds: dict[str, float]
    """Of one iteration, by part."""


def predict(costs: Costs, num_workers: int, *, overlap: bool, cores: int | None = None) -> Prediction:
    """Predict environment steps a second.

    A worker needs W = T (N e + p) for a rollout, its weights come over log2(workers + 1) hops, and n rollouts of R
    bytes share one way into the learner, which then needs L = l0 + n l for them and U for its update:

        synchronous   t = latency + weights + W + n R / bandwidth + L + U
        overlapped    t = max(latency + weights + W + R / bandwidth, n R / bandwidth, L + U)

    Where workers and learner share ``cores``, with C of W on the processor, t is at least (n C + L + U) / cores, and
    synchronous workers take at least n C / cores.
    """
    samples = num_workers * costs.num_envs * costs.num_steps
    rollout = costs.num_steps * (costs.num_envs * costs.env_step + costs.policy_step)
    busy = num_workers * costs.num_steps * (costs.num_envs * costs.env_cpu + costs.policy_step)
    weights = costs.weight_bytes / costs.bandwidth * float(np.ceil(np.log2(num_workers + 1)))
    network = num_workers * costs.rollout_bytes / costs.bandwidth
    handling = costs.learner_call + num_workers * costs.learner_rollout
    update = samples * costs.update_step
    if not overlap:
        crowded = max(rollout, busy / cores) if cores else rollout
        parts = {"workers": costs.latency + weights + crowded, "network": network}
        parts |= {"learner: rollouts": handling, "learner: update": update}
        seconds = sum(parts.values())
        return Prediction(samples / seconds, max(parts, key=lambda name: parts[name]), parts)
    parts = {"workers": costs.latency + weights + rollout + costs.rollout_bytes / costs.bandwidth, "network": network}
    parts["learner: update" if update > handling else "learner: rollouts"] = handling + update
    if cores:
        parts["cores"] = (busy + handling + update) / cores
    bottleneck = max(parts, key=lambda name: parts[name])
    return Prediction(samples / parts[bottleneck], bottleneck, parts)


class FrozenEnv(VecEnv):
    """Looks like another environment, and its steps cost nothing."""

    def __init__(self, env: VecEnv) -> None:
        self.num_envs, self.device = env.num_envs, env.device
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.obs: Observation = env.reset(seed=0).clone()
        zero = torch.zeros(env.num_envs, 1)
        self.result = EnvStep(self.obs, zero, zero.bool(), zero.bool())

    def reset(self, seed: int | None = None) -> Observation:
        return self.obs

    def step(self, action: torch.Tensor) -> EnvStep:
        return self.result


class WaitingEnv(VecEnv):
    """Waits at every step, and uses no processor."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.device = num_envs, torch.device("cpu")
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (16,))
        self.action_space = gym.spaces.Box(-1.0, 1.0, (4,))
        zero = torch.zeros(num_envs, 1)
        self.result = EnvStep(torch.zeros(num_envs, 16), zero, zero.bool(), zero.bool())

    def reset(self, seed: int | None = None) -> Observation:
        return self.result.obs

    def step(self, action: torch.Tensor) -> EnvStep:
        time.sleep(WAIT_SECONDS)
        return self.result


def make_task(task: str) -> VecEnv:
    return WaitingEnv(NUM_ENVS) if task == WAITING else make_env(task, NUM_ENVS)


class Echo:
    """An actor that sends bytes."""

    def send(self, num_bytes: int) -> np.ndarray[Any, Any]:
        return np.zeros(num_bytes, np.uint8)


def timed(function: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of one call: the lower quartile of several."""
    seconds = []
    for _ in range(repeats):
        begin = clock()
        function()
        seconds.append(clock() - begin)
    return float(np.quantile(seconds, 0.25))


class Inputs:
    """Measures each input of the model alone; the least of all rounds is kept."""

    def __init__(self, task: str, session: RaySession) -> None:
        self.task, self.session = task, session
        self.env = make_task(task)
        self.policy = ActorCritic.for_env(self.env, actor_cfg=NETWORK, critic_cfg=NETWORK)
        self.ppo = PPO(policy=self.policy, cfg=CONFIG)
        self.env.reset(seed=0)
        space = self.env.action_space
        self.actions = torch.from_numpy(np.stack([space.sample() for _ in range(NUM_ENVS)]))
        self.frozen = SyncCollector(FrozenEnv(self.env), self.policy, keep=self.ppo.required_keys)
        self.frozen.start()
        self.batch = pack(self.frozen.take_steps(NUM_STEPS))
        self.echo: Any = session.remote(Echo).remote()
        self.least: dict[str, float] = {}

    def measure(self) -> None:
        """Do one round."""
        step, session = partial(self.env.step, self.actions), self.session
        found = {
            "env_step": timed(step, NUM_STEPS) / NUM_ENVS,
            "env_cpu": timed(step, NUM_STEPS, time.process_time) / NUM_ENVS,
            "policy_step": timed(lambda: pack(self.frozen.take_steps(NUM_STEPS)), 10, time.process_time) / NUM_STEPS,
            "latency": timed(lambda: session.get(self.echo.send.remote(1)), 30),
            "large": timed(lambda: session.get(self.echo.send.remote(2**24)).copy(), 5),
            "put": timed(lambda: session.put(weights_of(self.policy), "weights"), 10),
            "one": timed(lambda: self.handle(1), 10, time.process_time),
            "five": timed(lambda: self.handle(5), 10, time.process_time),
            "update": timed(lambda: self.ppo.update(self.handle(1)), 2, time.process_time),
        }
        for name, seconds in found.items():
            self.least[name] = min(seconds, self.least.get(name, seconds))

    def handle(self, num_workers: int) -> Any:
        """Do with rollouts what the learner does when they have come."""
        batch = side_by_side_arrays([self.batch] * num_workers)
        fold_episodes(batch, self.env.metric_specs, EpisodeMetrics())
        with torch.no_grad():
            batch[VALUE], batch[NEXT_VALUE] = self.policy.values(batch)
        return batch

    def costs(self) -> Costs:
        least = self.least
        each = max(0.0, (least["five"] - least["one"]) / 4)
        return Costs(
            env_step=least["env_step"],
            env_cpu=least["env_cpu"],
            policy_step=least["policy_step"],
            latency=least["latency"],
            bandwidth=2**24 / (least["large"] - least["latency"]),
            rollout_bytes=float(sum(array.nbytes for array in self.batch.values())),
            weight_bytes=float(sum(array.nbytes for array in weights_of(self.policy).values())),
            learner_rollout=each,
            learner_call=least["put"] + max(0.0, least["one"] - each),
            update_step=(least["update"] - least["one"]) / (NUM_ENVS * NUM_STEPS),
        )


def measure(collector: RayCollector, seconds: float) -> float:
    """Return the steps a second that a collector really collects."""
    steps, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        steps += collector.collect(NUM_STEPS).numel()
    return steps / elapsed


def run(task: str, rounds: int, seconds: float) -> dict[str, Any]:
    session = RaySession(4)
    inputs = Inputs(task, session)
    policy, keep = inputs.policy, inputs.ppo.required_keys
    found: dict[tuple[int, bool], list[float]] = {(n, overlap): [] for overlap in (False, True) for n in (1, 2)}
    collectors = {n: RayCollector(partial(make_task, task), policy, num_workers=n, keep=keep, seed=0) for n in (1, 2)}
    loads = []
    for number in range(rounds + 1):
        inputs.measure()
        for (n, overlap), speeds in found.items():
            collectors[n].max_staleness = int(overlap)
            collectors[n].collect(NUM_STEPS)
            speed = measure(collectors[n], seconds)
            collectors[n].restart(number)  # waits for what runs ahead, so that the next one has the cores
            if number:  # the first round warms up
                speeds.append(speed)
        loads.append(os.getloadavg()[0])
    for collector in collectors.values():
        collector.close()
    session.leave()
    cores = len(os.sched_getaffinity(0))
    rows = [
        {"workers": n, "overlap": overlap, "steps_per_s": max(speeds), "all": speeds}
        for (n, overlap), speeds in found.items()
    ]
    return {"task": task, "costs": asdict(inputs.costs()), "measured": rows, "loads": loads, "cores": cores}


# What was found


def show(content: dict[str, Any]) -> None:
    """Print inputs, predicted against measured, and the extrapolation."""
    for found in content["tasks"]:
        costs = Costs(**found["costs"])
        print(f"\n{found['task']}, {costs.num_envs} environments a worker, rollouts of {costs.num_steps} steps")
        for name, value in found["costs"].items():
            print(f"  {name:16} {value:14.6g}")
        print(f"load {min(found['loads']):.1f} to {max(found['loads']):.1f} on {found['cores']} cores\n")
        print("| workers | way | predicted steps/s | measured | error |\n|---|---|---|---|---|")
        for row, said, error in checked(found):
            way = "overlapped" if row["overlap"] else "synchronous"
            print(f"| {row['workers']} | {way} | {said:,.0f} | {row['steps_per_s']:,.0f} | {error:+.0%} |")
        speed = {(row["workers"], row["overlap"]): row["steps_per_s"] for row in found["measured"]}
        for overlap, way in ((False, "synchronous"), (True, "overlapped")):
            print(f"two workers, {way}: {speed[2, overlap] / speed[1, overlap]:.2f} x one")
    for title, case in cases(costs).items():
        print(f"\n{title}\n| workers | synchronous | limit | overlapped | limit |\n|---|---|---|---|---|")
        for n in CLUSTER:
            sync, overlapped = (predict(case, n, overlap=overlap) for overlap in (False, True))
            print(
                f"| {n} | {sync.steps_per_s:,.0f} | {sync.bottleneck} | {overlapped.steps_per_s:,.0f} | "
                f"{overlapped.bottleneck} |"
            )


def checked(content: dict[str, Any]) -> list[tuple[dict[str, Any], float, float]]:
    """Return each measurement with the prediction for it and the error of that."""
    costs = replace(Costs(**content["costs"]), update_step=0.0)
    rows = []
    for row in content["measured"]:
        said = predict(costs, row["workers"], overlap=row["overlap"], cores=content["cores"]).steps_per_s
        rows.append((row, said, said / row["steps_per_s"] - 1))
    return rows


def cases(costs: Costs) -> dict[str, Costs]:
    """Return what the extrapolation is about: a cluster with a core for every worker, and a network between."""
    cluster = replace(
        costs,
        bandwidth=min(costs.bandwidth, NETWORK_BANDWIDTH),
        latency=costs.latency + NETWORK_LATENCY,
        update_step=0.0,
    )
    images = cluster.rollout_bytes + CAMERA_BYTES * cluster.num_envs * cluster.num_steps
    return {
        "collecting": cluster,
        "collecting, with two cameras": replace(cluster, rollout_bytes=images),
        "learning on this CPU": replace(cluster, update_step=costs.update_step),
        "learning 100 times as fast": replace(cluster, update_step=costs.update_step / 100),
    }


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw steps a second over workers."""
    import matplotlib.pyplot as plt

    found = content["tasks"][-1]
    costs = Costs(**found["costs"])
    figure, axes = plt.subplots(figsize=(7, 4.2))
    workers: Sequence[int] = np.unique(np.geomspace(1, CLUSTER[-1], 60).astype(int)).tolist()
    one = predict(cases(costs)["collecting"], 1, overlap=True).steps_per_s
    axes.plot(workers, [n * one for n in workers], color="0.7", linewidth=1, label="linear")
    for (title, case), color in zip(cases(costs).items(), ("C0", "C1", "C2", "C3"), strict=True):
        said = [predict(case, n, overlap=True) for n in workers]
        axes.plot(workers, [each.steps_per_s for each in said], color=color, label=title)
        end = (workers[-1], 1.08 * said[-1].steps_per_s)
        axes.annotate(f"limit: {said[-1].bottleneck}", end, fontsize=7, color=color, ha="right")
    sync = [predict(cases(costs)["collecting"], n, overlap=False).steps_per_s for n in workers]
    axes.plot(workers, sync, "--", color="C0", linewidth=1, label="collecting, synchronous")
    points = [row for row in found["measured"] if row["overlap"]]
    axes.plot([p["workers"] for p in points], [p["steps_per_s"] for p in points], "ko", ms=4, label="measured here")
    axes.set(xscale="log", yscale="log", xlabel="workers, one core each", ylabel="environment steps a second")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=f"{WAITING},{FETCH}", help="the last one is extrapolated")
    parser.add_argument("--rounds", type=int, default=4, help="of which the fastest counts")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one measurement")
    parser.add_argument("--quick", action="store_true", help="one short round: for a look; writes nothing")
    parser.add_argument("--draw", type=Path, help="only draw, and show, what was measured last")
    options = parser.parse_args()
    stored = Path(__file__).with_suffix(".json")
    if options.draw:
        content = json.loads(stored.read_text())
        show(content)
        draw(content, options.draw)
        return
    torch.set_num_threads(1)
    rounds, seconds = (1, 1.0) if options.quick else (options.rounds, options.seconds)
    content = {"tasks": [run(task, rounds, seconds) for task in options.tasks.split(",")]}
    show(content)
    if not options.quick:
        print(f"wrote {report.write('scaling', content)}")


if __name__ == "__main__":
    main()
