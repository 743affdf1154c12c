"""SAC: ours and Stable-Baselines3, how fast and how well.

    python benchmarks/sac.py speed
    python benchmarks/sac.py learning [--seeds 0,1,2] [--steps 100000] [--jobs 1]

Both: one update a step (four steps, then four updates), batches of 256, networks 256-256. ``speed`` is on Pendulum-v1
with one CPU thread; or, where there is a GPU, on the tensor task ``pendulum`` there, alone and with 1,024 environments,
eight updates after four steps of each: how many updates a second, as plain operations and as CUDA graphs.
``learning`` is on HalfCheetah-v5 with the preset ``halfcheetah_sac``, both on a GPU where there is one.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

import compare_learning
import report
import torch

from apexrl import SAC, SACConfig, Trainer, make_env
from apexrl.agent import TrainingConfig
from apexrl.collectors import SyncCollector
from apexrl.core.system.acceleration import Acceleration
from apexrl.run.build import make_policy
from apexrl.run.loading import load_config

TASK = "HalfCheetah-v5"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ours(seed: int, steps: int, episodes: int) -> tuple[float, float]:
    config = load_config("halfcheetah_sac")
    torch.manual_seed(seed)
    env = make_env(TASK, 1)
    policy: Any = make_policy(config.policy, env, DEVICE, config.algo)
    assert isinstance(config.algo, SACConfig)
    algorithm = SAC(policy=policy, cfg=config.algo, acceleration=Acceleration(compile=DEVICE.type == "cpu"))
    trainer = Trainer(env, policy, algorithm, TrainingConfig(seed=seed, eval_num_envs=5))
    trainer.learn(steps)
    result = float(trainer.evaluate(episodes)), float(trainer.evaluate(episodes, deterministic=False))
    trainer.close()
    return result


def sb3(seed: int, steps: int, episodes: int) -> tuple[float, float]:
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env

    env = make_vec_env(TASK, 1, seed=seed)
    model = stable_baselines3.SAC(
        "MlpPolicy", env, learning_rate=3e-4, learning_starts=10_000, train_freq=4, gradient_steps=4, seed=seed,
        device=DEVICE,
    )  # fmt: skip
    model.learn(steps)
    return compare_learning.sb3_returns(model, env, seed, episodes)


def steps_per_second(acceleration: Acceleration, steps: int = 2000) -> float:
    """Train on Pendulum-v1 with everything on, after a warm-up that is not counted."""
    acceleration.apply()
    torch.manual_seed(0)
    env = make_env("Pendulum-v1", 1)
    algorithm = SAC(env, SACConfig(learning_starts=100), device="cpu", acceleration=acceleration)
    trainer = Trainer(env, algorithm.policy, algorithm, TrainingConfig())
    trainer.learn(400)
    started = time.perf_counter()
    trainer.learn(400 + steps)
    return steps / (time.perf_counter() - started)


def sb3_steps_per_second(steps: int = 1000) -> float:
    import stable_baselines3

    model = stable_baselines3.SAC(
        "MlpPolicy", "Pendulum-v1", learning_starts=100, train_freq=4, gradient_steps=4, seed=0, device="cpu"
    )
    model.learn(400)
    started = time.perf_counter()
    model.learn(steps, reset_num_timesteps=False)
    return steps / (time.perf_counter() - started)


def gpu_updates_per_second(acceleration: Acceleration, num_envs: int, updates: int = 2000) -> tuple[float, float]:
    """Collect and learn on the GPU alone; returns updates and environment steps a second."""
    acceleration.apply()
    torch.manual_seed(0)
    env = make_env("pendulum", num_envs, device=torch.device("cuda"))
    cfg = SACConfig(num_steps=4, utd_ratio=8 / (4 * num_envs), learning_starts=4 * num_envs, buffer_size=1_000_000)
    algorithm = SAC(env, cfg, device="cuda", acceleration=acceleration)
    collector = SyncCollector(env, algorithm.policy, keep=SAC.required_keys, seed=0, acceleration=acceleration)
    for _ in range(8):
        algorithm.update(collector.collect(cfg.num_steps))
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(updates // 8):
        algorithm.update(collector.collect(cfg.num_steps))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return updates / seconds, updates // 8 * cfg.num_steps * num_envs / seconds


def speed() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []

    def add(where: str, name: str, value: float, base: float | None, unit: str = "steps/s") -> float:
        rows.append({"where": where, "name": name, "value": value, "unit": unit, "ratio": value / base if base else 1})
        print(f"{where:28} {name:24} {value:12,.1f} {unit:10} {value / (base or value):6.2f} x", flush=True)
        return value

    if torch.cuda.is_available():
        for num_envs in (1, 1024):
            where, base = f"pendulum, {num_envs} on the GPU", None
            for name, acceleration in (
                ("ours, plain", Acceleration(graphs=False)),
                ("ours, graphs", Acceleration()),
                ("ours, graphs, compiled", Acceleration(compile=True)),
                ("ours, bf16, compiled", Acceleration(compile=True, precision="bf16")),
            ):
                updates, steps = gpu_updates_per_second(acceleration, num_envs)
                value = add(where, name, updates, base, "updates/s")
                rows[-1]["steps_per_second"] = steps
                base = base or value
    else:
        base = add("Pendulum-v1, one thread", "Stable-Baselines3", sb3_steps_per_second(), None)
        add("Pendulum-v1, one thread", "ours", steps_per_second(Acceleration()), base)
        add("Pendulum-v1, one thread", "ours, compiled", steps_per_second(Acceleration(compile=True)), base)
        bf16 = Acceleration(compile=True, precision="bf16")
        add("Pendulum-v1, one thread", "ours, bf16, compiled", steps_per_second(bf16), base)
    print(f"wrote {report.write('sac_speed_gpu' if torch.cuda.is_available() else 'sac_speed_cpu', {'rows': rows})}")


if __name__ == "__main__":
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what == "speed":
        speed()
    elif what == "learning":
        contenders = {"stable-baselines3": sb3, "apexrl": ours}
        compare_learning.compare("sac_learning", TASK, 100_000, contenders, __doc__, sys.argv[2:])
    else:
        sys.exit(__doc__)
