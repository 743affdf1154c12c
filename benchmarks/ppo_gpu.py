"""PPO on one GPU, the legged-robot shape: ours with every feature on, rsl_rl, and a hand-written lower bound.

    python benchmarks/ppo_gpu.py [--envs 1024,4096,16384] [--iters 60]

48 observations, 12 actions, networks 512-256-128 (ELU), 24 steps, 5 epochs of 4 minibatches, adaptive learning rate, on
a task that costs almost nothing, so that the training framework is what is timed. ``limit`` is a bare loop with rollout
and update captured as CUDA graphs: no logs, no metrics, no correct time limits.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import report
import torch
from torch import Tensor, nn

from apexrl.agent import Trainer, TrainingConfig
from apexrl.agent.loggers import JsonlLogger
from apexrl.algorithms import PPO, PPOConfig
from apexrl.collectors import SyncCollector
from apexrl.core.metrics import MetricSpec
from apexrl.core.system.acceleration import Acceleration
from apexrl.envs.tasks.base import TensorTask, Transition
from apexrl.policies import ActorCritic

OBS, ACT, STEPS, EPOCHS, MINIBATCHES, HORIZON = 48, 12, 24, 5, 4, 1000
HIDDEN = (512, 256, 128)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dynamics() -> tuple[Tensor, Tensor]:
    """Stable linear dynamics, the same for every contender."""
    g = torch.Generator(device="cpu").manual_seed(0)
    a = torch.eye(OBS) * 0.95 + 0.02 * torch.randn(OBS, OBS, generator=g) / math.sqrt(OBS)
    b = 0.3 * torch.randn(ACT, OBS, generator=g) / math.sqrt(ACT)
    return a.to(DEVICE), b.to(DEVICE)


def advance(state: Tensor, action: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the next state, the reward and whether the robot fell."""
    state = state @ a + torch.tanh(action) @ b
    return state, 1.0 / (1.0 + state.square().mean(-1)), state.abs().amax(-1) > 8.0


class LeggedShape(TensorTask):
    """The benchmark's task as one of ours, with a metric, so that metrics are on."""

    state_size = OBS
    metrics = (MetricSpec("success"), MetricSpec("speed_reward"))

    def __init__(self, num_envs: int, device: torch.device | str = DEVICE) -> None:
        self.observation_space = gym.spaces.Box(-math.inf, math.inf, (OBS,))
        self.action_space = gym.spaces.Box(-1.0, 1.0, (ACT,))
        self.max_episode_steps = HORIZON
        self.a, self.b = dynamics()
        super().__init__(num_envs, device)

    def _draw(self) -> Tensor:
        return torch.randn(self.num_envs, OBS, device=self.device, generator=self.generator)

    def _advance(self, state: Tensor, action: Tensor) -> Transition:
        state, reward, fallen = advance(state, action, self.a, self.b)
        reward = reward.unsqueeze(-1)
        metric = {"success": (reward > 0.9).float(), "speed_reward": reward}
        return Transition(state, reward, fallen.unsqueeze(-1), metric)

    def _observe(self, state: Tensor) -> Tensor:
        return state

    def _render(self, canvas: Any, state: list[float]) -> None:
        raise NotImplementedError


def make_ours(num_envs: int, acceleration: Acceleration, run_dir: Path, schedule: Any = "adaptive") -> Trainer:
    """Our trainer with logs, metrics, callbacks and correct time limits."""
    torch.manual_seed(0)
    acceleration.apply()
    env = LeggedShape(num_envs)
    network = {"hidden_dims": HIDDEN, "activation": "elu"}
    policy = ActorCritic.for_env(env, actor_cfg=network, critic_cfg=network).to(DEVICE)
    cfg = PPOConfig(
        num_steps=STEPS, num_epochs=EPOCHS, num_minibatches=MINIBATCHES, learning_rate=1e-3, schedule=schedule,
        value_clip_coef=0.2, entropy_coef=0.01,
    )  # fmt: skip
    algorithm = PPO(policy=policy, cfg=cfg, acceleration=acceleration)
    collector = SyncCollector(env, policy, keep=PPO.required_keys, seed=0, acceleration=acceleration)
    return Trainer(
        env, policy, algorithm, TrainingConfig(save_interval=0), collector=collector,
        loggers=[JsonlLogger(run_dir / "metrics.jsonl")], run_dir=run_dir,
    )  # fmt: skip


def time_ours(num_envs: int, iters: int, acceleration: Acceleration) -> float:
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_ours(num_envs, acceleration, Path(directory))
        times: list[float] = []
        trainer.add_callback("post_iteration", lambda *_: times.append(time.perf_counter()))
        trainer.learn((iters + 10) * STEPS * num_envs)
        return (times[-1] - times[9]) / iters


def time_rsl(num_envs: int, iters: int) -> float:
    from rsl_rl.runners import OnPolicyRunner
    from tensordict import TensorDict

    class Env:
        def __init__(self) -> None:
            self.a, self.b = dynamics()
            self.num_envs, self.num_actions, self.device, self.max_episode_length = num_envs, ACT, DEVICE, HORIZON
            self.cfg: dict[str, Any] = {}
            self.state = torch.randn(num_envs, OBS, device=DEVICE)
            self.episode_length_buf = torch.randint(0, HORIZON, (num_envs,), device=DEVICE)

        def get_observations(self) -> TensorDict:
            return TensorDict({"policy": self.state.clone()}, batch_size=[num_envs])

        def step(self, action: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Tensor]]:
            state, reward, fallen = advance(self.state, action, self.a, self.b)
            self.episode_length_buf += 1
            time_out = self.episode_length_buf >= HORIZON
            done = fallen | time_out
            self.state = torch.where(done[:, None], torch.randn_like(state), state)
            self.episode_length_buf.mul_(~done)
            return self.get_observations(), reward, done, {"time_outs": time_out}

    model = {"class_name": "MLPModel", "hidden_dims": list(HIDDEN), "activation": "elu", "obs_normalization": False}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0}
    cfg = {
        "num_steps_per_env": STEPS, "save_interval": 10**9, "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "algorithm": {"class_name": "PPO"}, "check_for_nan": False, "torch_compile_mode": None,
        "actor": {**model, "distribution_cfg": gaussian}, "critic": dict(model),
    }  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        runner = OnPolicyRunner(Env(), cfg, log_dir=None, device=str(DEVICE))
        runner.learn(10)
        torch.cuda.synchronize()
        started = time.perf_counter()
        runner.learn(iters)
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / iters


def time_limit(num_envs: int, iters: int) -> float:
    """A bare PPO loop, TF32, rollout and update captured: what the hardware allows."""
    torch.set_float32_matmul_precision("high")
    a, b = dynamics()
    state, elapsed = torch.randn(num_envs, OBS, device=DEVICE), torch.randint(0, HORIZON, (num_envs,), device=DEVICE)

    def mlp(out: int) -> nn.Sequential:
        dims = [OBS, *HIDDEN]
        layers = [layer for i, o in itertools.pairwise(dims) for layer in (nn.Linear(i, o), nn.ELU())]
        return nn.Sequential(*layers, nn.Linear(HIDDEN[-1], out)).to(DEVICE)

    actor, critic = mlp(ACT), mlp(1)
    log_std = nn.Parameter(torch.zeros(ACT, device=DEVICE))
    params = [*actor.parameters(), log_std, *critic.parameters()]
    rate = torch.tensor(1e-3, device=DEVICE)
    adam = torch.optim.Adam(params, lr=rate, capturable=True, fused=True)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, device=DEVICE)

    obs, act, mean = zeros(STEPS, num_envs, OBS), zeros(STEPS, num_envs, ACT), zeros(STEPS, num_envs, ACT)
    reward, log_prob, done, advantage, target = (zeros(STEPS, num_envs) for _ in range(5))
    value = zeros(STEPS + 1, num_envs)

    def log_density(x: Tensor, m: Tensor) -> Tensor:
        return (-0.5 * ((x - m) / log_std.exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    @torch.no_grad()
    def collect() -> None:
        for t in range(STEPS):
            obs[t].copy_(state)
            m = actor(state)
            x = m + log_std.exp() * torch.randn_like(m)
            v = critic(state).squeeze(-1)
            mean[t].copy_(m)
            act[t].copy_(x)
            log_prob[t].copy_(log_density(x, m))
            value[t].copy_(v)
            s, r, fallen = advance(state, x, a, b)
            elapsed.add_(1)
            time_out = elapsed >= HORIZON
            ended = fallen | time_out
            state.copy_(torch.where(ended[:, None], torch.randn_like(s), s))
            elapsed.mul_(~ended)
            reward[t].copy_(r + 0.99 * v * time_out)
            done[t].copy_(ended)
        value[STEPS].copy_(critic(state).squeeze(-1))
        trace = torch.zeros_like(reward[0])
        for t in reversed(range(STEPS)):
            alive = 1 - done[t]
            trace = reward[t] + 0.99 * alive * value[t + 1] - value[t] + 0.99 * 0.95 * alive * trace
            advantage[t].copy_(trace)
        target.copy_(advantage + value[:-1])
        advantage.copy_((advantage - advantage.mean()) / (advantage.std() + 1e-8))

    size = STEPS * num_envs // MINIBATCHES
    rows = torch.zeros(size, dtype=torch.long, device=DEVICE)
    old_std = torch.ones(ACT, device=DEVICE)

    def update() -> None:
        o, x, l0, m0, adv, ret, v0 = (
            tensor.reshape(STEPS * num_envs, *tensor.shape[2:])[rows]
            for tensor in (obs, act, log_prob, mean, advantage, target, value[:-1])
        )
        m, v, std = actor(o), critic(o).squeeze(-1), log_std.exp()
        with torch.no_grad():
            kl = (torch.log(std / old_std) + (old_std**2 + (m0 - m) ** 2) / (2 * std**2) - 0.5).sum(-1).mean()
            slower, faster = (rate / 1.5).clamp(min=1e-5), (rate * 1.5).clamp(max=1e-2)
            rate.copy_(torch.where(kl > 0.02, slower, torch.where(kl < 0.005, faster, rate)))
        ratio = (log_density(x, m) - l0).exp()
        policy_loss = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
        clipped = v0 + (v - v0).clamp(-0.2, 0.2)
        value_loss = torch.max((v - ret) ** 2, (clipped - ret) ** 2).mean()
        loss = policy_loss + value_loss - 0.01 * (0.5 + 0.5 * math.log(2 * math.pi) + log_std).sum()
        adam.zero_grad(set_to_none=False)
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        adam.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            collect()
            rows.copy_(torch.randperm(STEPS * num_envs, device=DEVICE)[:size])
            update()
    torch.cuda.current_stream().wait_stream(stream)
    rollout_graph, update_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(rollout_graph):
        collect()
    with torch.cuda.graph(update_graph):
        update()

    def iterate() -> None:
        rollout_graph.replay()
        with torch.no_grad():
            old_std.copy_(log_std.exp())
        for _ in range(EPOCHS):
            order = torch.randperm(STEPS * num_envs, device=DEVICE)
            for k in range(MINIBATCHES):
                rows.copy_(order[k * size : (k + 1) * size])
                update_graph.replay()

    for _ in range(10):
        iterate()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(iters):
        iterate()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / iters


def parameters_after(acceleration: Acceleration, iterations: int, num_envs: int = 256) -> Tensor:
    """Train a little from one seed with a fixed learning rate and return all weights."""
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_ours(num_envs, acceleration, Path(directory), schedule="fixed")
        trainer.learn(iterations * STEPS * num_envs)
        return torch.cat([p.detach().flatten().cpu() for p in trainer.policy.parameters()])


def check_parity() -> dict[str, float]:
    """Largest difference between eager weights and those of the faster paths after ten iterations."""
    eager = parameters_after(Acceleration(graphs=False), 10)
    paths = {"graph": Acceleration(), "compiled graph": Acceleration(compile=True)}
    return {name: (parameters_after(path, 10) - eager).abs().max().item() for name, path in paths.items()}


def check_syncs(num_envs: int = 1024) -> str:
    """Collect and update with every host synchronisation turned into an error."""
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_ours(num_envs, Acceleration(), Path(directory))
        trainer.learn(6 * STEPS * num_envs)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            trainer.algorithm.update(trainer.collector.collect(STEPS))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return "none"


def measure(name: str, num_envs: int, iters: int) -> dict[str, float]:
    """Run one contender in a process of its own, so that memory and state of the others do not count."""
    command = [sys.executable, __file__, "--one", name, "--envs", str(num_envs), "--iters", str(iters)]
    output = subprocess.run(command, capture_output=True, text=True, check=False)
    if output.returncode:
        raise SystemExit(output.stderr)
    result: dict[str, float] = json.loads(output.stdout.splitlines()[-1])
    return result


def run_one(name: str, num_envs: int, iters: int) -> None:
    """Print seconds per iteration and the peak of allocated memory in MiB."""
    seconds = CONTENDERS[name](num_envs, iters)
    print(json.dumps({"seconds": seconds, "memory_mib": torch.cuda.max_memory_allocated() / 2**20}))


CONTENDERS: dict[str, Callable[[int, int], float]] = {
    "rsl_rl": time_rsl,
    "limit, TF32": time_limit,
    "ours, TF32": lambda n, iters: time_ours(n, iters, Acceleration(precision="tf32")),
    "ours, TF32, compiled": lambda n, iters: time_ours(n, iters, Acceleration(precision="tf32", compile=True)),
    "ours, bf16, compiled": lambda n, iters: time_ours(n, iters, Acceleration(precision="bf16", compile=True)),
    "ours, eager": lambda n, iters: time_ours(n, iters, Acceleration(precision="tf32", graphs=False)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", default="1024,4096,16384")
    parser.add_argument("--iters", type=int, default=60)
    parser.add_argument("--one", choices=list(CONTENDERS), help="time one contender in this process, print JSON")
    parser.add_argument("--skip", default="", help="contenders to leave out, by a part of their name, separated by ;")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    if options.one:
        run_one(options.one, int(options.envs), options.iters)
        return
    rows: list[dict[str, Any]] = []
    for num_envs in map(int, options.envs.split(",")):
        base: dict[str, float] = {}
        for name in CONTENDERS:
            if options.skip and any(part in name for part in options.skip.split(";")):
                continue
            result = measure(name, num_envs, options.iters)
            base = base or result
            ratio, memory = base["seconds"] / result["seconds"], result["memory_mib"] / base["memory_mib"]
            rows.append({"envs": num_envs, "name": name, **result, "times_rsl": ratio, "memory_times_rsl": memory})
            speed = STEPS * num_envs / result["seconds"] / 1e6
            print(
                f"{num_envs:6d} environments  {name:22} {1e3 * result['seconds']:8.2f} ms/iteration "
                f"{speed:7.2f} M steps/s {ratio:6.2f} x rsl_rl  {result['memory_mib']:6.0f} MiB {memory:5.2f} x",
                flush=True,
            )
    parity = check_parity()
    print("largest weight difference to eager after 10 iterations:", parity, flush=True)
    print("host synchronisations in collect and update:", check_syncs(), flush=True)
    print(f"wrote {report.write('ppo_gpu', {'rows': rows, 'iters': options.iters, 'parity': parity})}")


if __name__ == "__main__":
    main()
