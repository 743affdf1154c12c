"""PPO-ROA against plain PPO on one GPU: time of an iteration, and of a gradient step.

    python benchmarks/roa_speed.py [--envs 4096] [--iters 50]

The task ``payload``, networks and minibatches of the preset ``payload_roa``. PPO sees the same observations, privileged
groups included, and takes as many steps on each rollout; PPO-ROA adds those of its adaptation module.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import fields
from typing import Any

import report
import torch

from apexrl import PPO, PPOROA, ActorCritic, PPOConfig, PPOROAConfig, SyncCollector, make_env
from apexrl.core.system.acceleration import Acceleration
from apexrl.policies.config import PolicyConfig
from apexrl.run.build import make_policy
from apexrl.run.loading import load_config


def seconds(algorithm: Any, env: Any, iters: int) -> float:
    """Return the time of one iteration, everything captured that can be."""
    collector = SyncCollector(
        env, algorithm.rollout_policy, keep=algorithm.required_keys, seed=0, acceleration=algorithm.acceleration
    )
    for _ in range(5):
        algorithm.update(collector.collect(algorithm.num_steps))
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(iters):
        algorithm.update(collector.collect(algorithm.num_steps))
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / iters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, default=4096)
    parser.add_argument("--iters", type=int, default=50)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = torch.device("cuda")
    config = load_config("payload_roa", [("task.num_envs", str(options.envs))])
    cfg = config.algo
    assert isinstance(cfg, PPOROAConfig)
    assert isinstance(config.policy, PolicyConfig)
    rows: list[dict[str, Any]] = []
    for name in ("ppo", "ppo_roa, train", "ppo_roa, finetune"):
        torch.manual_seed(0)
        env = make_env("payload", options.envs, device=device)
        steps = cfg.num_epochs * cfg.num_minibatches
        algorithm: Any
        if name == "ppo":
            shared = {entry.name: getattr(cfg, entry.name) for entry in fields(PPOConfig) if entry.name != "name"}
            layers = {"hidden_dims": config.policy.hidden_dims, "activation": config.policy.activation}
            policy: Any = ActorCritic.for_env(env, actor_cfg=layers, critic_cfg=layers).to(device)
            algorithm = PPO(policy=policy, cfg=PPOConfig(**shared), acceleration=Acceleration())
        else:
            phase = name.split(", ")[1]
            changed = load_config("payload_roa", [("algo.phase", phase)]).algo
            assert isinstance(changed, PPOROAConfig)
            policy = make_policy(config.policy, env, device, changed)
            algorithm = PPOROA(policy, changed, acceleration=Acceleration())
            steps += cfg.adapt_epochs * cfg.adapt_minibatches
        took = seconds(algorithm, env, options.iters)
        rows.append({"name": name, "milliseconds": 1e3 * took, "gradient_steps": steps, "per_step": 1e6 * took / steps})
        base = rows[0]["per_step"]
        print(
            f"{name:20} {1e3 * took:7.2f} ms an iteration, {steps:3} gradient steps, {rows[-1]['per_step']:7.1f} µs "
            f"each: {100 * base / rows[-1]['per_step']:.0f} % of PPO's throughput",
            flush=True,
        )
    print(f"wrote {report.write('roa_speed', {'envs': options.envs, 'rows': rows})}")


if __name__ == "__main__":
    main()
