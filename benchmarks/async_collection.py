"""Learning while the simulator steps: AsyncCollector against SyncCollector on a robot arm.

    python benchmarks/async_collection.py [--seeds 0,1,2] [--steps 40960] [--quick]

Gymnasium-Robotics' FetchReachDense-v4: 8 environments in one process of their own, so that the simulator has one core
and the learner, with one PyTorch thread, another. PPO with 64 steps a rollout, and an update that takes about as long
as the rollout (networks 768-768, 3 epochs of 8 minibatches). Both train the same networks with the same settings;
the return is that of 50 evaluation episodes afterwards. Needs ``pip install 'apexrl[robotics]'`` and two free cores:
the load is recorded, and much above 2 the figures are those of a busy machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import report
import torch

from apexrl.agent import Trainer, TrainingConfig
from apexrl.algorithms import PPO, PPOConfig
from apexrl.collectors import AsyncCollector, BaseCollector, SyncCollector
from apexrl.envs import make_env
from apexrl.policies import ActorCritic

TASK = "gymnasium_robotics:FetchReachDense-v4"
CONFIG = PPOConfig(
    num_steps=64, num_epochs=3, num_minibatches=8, learning_rate=3e-4, gamma=0.95, entropy_coef=0.0, target_kl=None
)
NETWORK = {"hidden_dims": (768, 768)}
COLLECTORS: dict[str, type[AsyncCollector | SyncCollector]] = {"sync": SyncCollector, "async": AsyncCollector}
WARM_UP = 3
"""Iterations before the clock starts."""


def train(name: str, seed: int, steps: int, episodes: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    env = make_env(TASK, 8, num_workers=1)
    policy = ActorCritic.for_env(env, actor_cfg=NETWORK, critic_cfg=NETWORK, normalize_obs=True)
    ppo = PPO(policy=policy, cfg=CONFIG)
    collector: BaseCollector = COLLECTORS[name](env, policy, keep=ppo.required_keys, seed=seed)
    cfg = TrainingConfig(seed=seed, save_interval=0, eval_num_envs=10)
    trainer = Trainer(env, policy, ppo, cfg, collector=collector)
    stats: list[dict[str, float]] = []
    ends: list[float] = []

    def note(_: Trainer, values: dict[str, float]) -> None:
        stats.append(values)
        ends.append(time.perf_counter())

    trainer.add_callback("post_iteration", note)
    trainer.learn(steps)
    timed = stats[WARM_UP:]
    row = {
        "collector": name,
        "seed": seed,
        "steps_per_second": len(timed) * CONFIG.num_steps * env.num_envs / (ends[-1] - ends[WARM_UP - 1]),
        "waiting": statistics.mean(line["time/rollout_share"] for line in timed),
        "overlap": statistics.mean(line.get("collect/overlap", 0.0) for line in timed),
        "staleness": statistics.mean(line.get("collect/staleness", 0.0) for line in timed),
        "load": os.getloadavg()[0],
        "return": float(trainer.evaluate(episodes)),
        "sampled": float(trainer.evaluate(episodes, deterministic=False)),
        "curve": [round(line["rollout/return"], 3) for line in stats if "rollout/return" in line][
            :: len(stats) // 20 or 1
        ],
    }
    trainer.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=40_960)
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--quick", action="store_true", help="one seed, few steps: for a look; writes nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [0] if options.quick else [int(seed) for seed in options.seeds.split(",")]
    steps = 8_192 if options.quick else options.steps
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        for name in COLLECTORS:
            row = train(name, seed, steps, options.episodes)
            rows.append(row)
            print(
                f"{name:6} seed {seed}  {row['steps_per_second']:6.0f} steps/s  learner waits {row['waiting']:4.0%}  "
                f"overlap {row['overlap']:4.0%}  staleness {row['staleness']:.2f}  return {row['return']:7.2f}  "
                f"with sampled actions {row['sampled']:7.2f}  "
                f"load {row['load']:.1f}",
                flush=True,
            )
    speed, final, sampled = (
        {name: [row[key] for row in rows if row["collector"] == name] for name in COLLECTORS}
        for key in ("steps_per_second", "return", "sampled")
    )
    ratio = statistics.mean(speed["async"]) / statistics.mean(speed["sync"])
    print(f"async / sync: {ratio:.2f} x steps/s")
    for name, returns in final.items():
        print(
            f"{name:6} return {statistics.mean(returns):7.2f} over {len(returns)} seeds, "
            f"{min(returns):.2f} to {max(returns):.2f}, with sampled actions {statistics.mean(sampled[name]):.2f}"
        )
    if not options.quick:
        content = {"task": TASK, "steps": steps, "ratio": ratio, "rows": rows}
        print(f"wrote {report.write('async_collection', content)}")


if __name__ == "__main__":
    main()
