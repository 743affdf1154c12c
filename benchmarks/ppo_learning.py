"""Learning on HalfCheetah-v5, Hopper-v5 and Walker2d-v5: ours against Stable-Baselines3 in the same run.

    python benchmarks/ppo_learning.py [--jobs 16] [--task Hopper-v5] [--seeds 100,101] [--steps 300000]
    python benchmarks/ppo_learning.py --only ours --seeds 900,901 --jobs 16 --out output/tuning.jsonl \
        --variant "smooth policy.gsde=true policy.init_std=0.14" --variant "capped algo.std_schedule=capped"

Ours are the presets; theirs has the same hyper-parameters as far as it knows them (``--peer preset``), or those of
HalfCheetah's preset before exploration was changed (``--peer standard``): one environment, 2048 steps, batches of 64,
10 epochs, learning rate 3e-4 falling to 0, networks 64-64 tanh, observations and rewards normalised. Our value loss has
the factor one half that theirs lacks, hence half our coefficient. Evaluation on the raw reward: with deterministic
actions, and with sampled ones. A run is stuck when its deterministic return is below half of the sampled one.

Every run is one process on one thread. Its result is appended to a file of JSON lines (``--out``) when it ends, and a
second call skips what the file holds already, by task, library, seed, steps, episodes, options and, for ours, commit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import time
import warnings
from pathlib import Path
from typing import Any

import compare_learning
import numpy as np
import report
import torch
from scipy import stats

from apexrl import PPO, PPOConfig, SyncCollector, Trainer
from apexrl.agent import TrainingConfig
from apexrl.core.system.acceleration import Acceleration
from apexrl.policies.config import PolicyConfig
from apexrl.run.build import make_policy
from apexrl.run.config import Config
from apexrl.run.loading import load_config

PRESETS = {"HalfCheetah-v5": "halfcheetah_ppo", "Hopper-v5": "hopper_ppo", "Walker2d-v5": "walker2d_ppo"}
SEEDS = tuple(range(100, 110))
"""Of the comparison; presets are chosen on others."""
OURS, THEIRS = "apexrl", "stable-baselines3"
STANDARD = {
    "task.num_envs": "1", "policy.hidden_dims": "[64, 64]", "policy.activation": "tanh", "policy.gsde": "false",
    "policy.init_std": "1.0", "algo.num_steps": "2048", "algo.num_minibatches": "32", "algo.num_epochs": "10",
    "algo.learning_rate": "0.0003", "algo.schedule": "linear", "algo.gamma": "0.99", "algo.gae_lambda": "0.95",
    "algo.clip_coef": "0.2", "algo.entropy_coef": "0.0", "algo.value_coef": "0.5", "algo.max_grad_norm": "0.5",
    "algo.normalize_reward": "true", "policy.normalize_obs": "true", "algo.target_kl": "null",
}  # fmt: skip

Job = dict[str, Any]
Row = dict[str, Any]


def ours(config: Config, seed: int, steps: int, episodes: int) -> tuple[float, float]:
    """Train our PPO; returns the mean return of deterministic and of sampled actions."""
    assert isinstance(config.algo, PPOConfig)
    torch.manual_seed(seed)
    env = config.task.make_env("cpu")
    policy = make_policy(config.policy, env, torch.device("cpu"), config.algo)
    acceleration = Acceleration(compile=bool(config.features.compile))
    algorithm = PPO(policy=policy, cfg=config.algo, acceleration=acceleration)
    collector = SyncCollector(env, policy, keep=algorithm.required_keys, seed=seed, acceleration=acceleration)
    trainer = Trainer(env, policy, algorithm, TrainingConfig(seed=seed, eval_num_envs=5), collector=collector)
    trainer.learn(steps)
    result = float(trainer.evaluate(episodes)), float(trainer.evaluate(episodes, deterministic=False))
    trainer.close()
    return result


def sb3(config: Config, seed: int, steps: int, episodes: int) -> tuple[float, float]:
    """Train theirs with the hyper-parameters of a configuration."""
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    algo, policy = config.algo, config.policy
    assert isinstance(algo, PPOConfig)
    assert isinstance(policy, PolicyConfig)
    num_envs, rate = config.task.num_envs, algo.learning_rate
    env = VecNormalize(
        make_vec_env(config.task.id, num_envs, seed=seed),
        norm_obs=policy.normalize_obs,
        norm_reward=algo.normalize_reward,
        gamma=algo.gamma,
    )
    critic_dims = policy.hidden_dims if policy.critic_hidden_dims is None else policy.critic_hidden_dims
    activation = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU, "elu": torch.nn.ELU, "silu": torch.nn.SiLU}
    model = stable_baselines3.PPO(
        "MlpPolicy",
        env,
        learning_rate=(lambda left: rate * left) if algo.schedule == "linear" else rate,
        n_steps=algo.num_steps,
        batch_size=algo.num_steps * num_envs // algo.num_minibatches,
        n_epochs=algo.num_epochs,
        gamma=algo.gamma,
        gae_lambda=algo.gae_lambda,
        clip_range=algo.clip_coef,
        ent_coef=algo.entropy_coef,
        vf_coef=algo.value_coef,
        max_grad_norm=algo.max_grad_norm,
        target_kl=algo.target_kl,
        use_sde=policy.gsde,
        sde_sample_freq=policy.gsde_interval or -1,
        policy_kwargs={
            "net_arch": {"pi": list(policy.hidden_dims), "vf": list(critic_dims)},
            "activation_fn": activation[policy.activation],
            "log_std_init": float(np.log(policy.init_std)),
        },
        seed=seed,
        device="cpu",
    )
    model.learn(steps)
    env.training, env.norm_reward = False, False
    return compare_learning.sb3_returns(model, env, seed, episodes)


def run(job: Job) -> Row:
    """Run one job in a process of its own."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    started = time.perf_counter()
    config = load_config(PRESETS[job["task"]], job["options"].items())
    train = ours if job["library"] == OURS else sb3
    try:
        deterministic, sampled = train(config, job["seed"], job["steps"], job["episodes"])
    except Exception as error:  # the other runs continue
        return {**job, "error": f"{type(error).__name__}: {error}"}
    seconds = time.perf_counter() - started
    return {**job, "return": deterministic, "sampled": sampled, "seconds": round(seconds, 1)}


def key(row: Row) -> str:
    """Return what tells one run from another."""
    names = ("task", "library", "variant", "options", "seed", "steps", "episodes")
    # Theirs does not change with our code.
    commit = row["commit"] if row["library"] == OURS else None
    return json.dumps([*(row[name] for name in names), commit], sort_keys=True)


def is_stuck(row: Row) -> bool:
    """Whether mean actions earn less than half of what sampled ones do."""
    return bool(row["return"] < 0.5 * row["sampled"])


def make_jobs(options: argparse.Namespace) -> list[Job]:
    """List the runs, the slow ones first, so that no core waits for the last."""
    given = dict(text.split("=", 1) for text in options.set)
    variants: dict[str, dict[str, str]] = {}
    for text in options.variant or [""]:
        words = shlex.split(text)
        name = words.pop(0) if words and "=" not in words[0] else " ".join(words)
        variants[name] = {**given, **dict(word.split("=", 1) for word in words)}
    if options.no_compile is False:
        variants = {name: {"features.compile": "true", **chosen} for name, chosen in variants.items()}
    libraries: dict[str, dict[str, dict[str, str]]] = {}
    if options.only != "ours":
        libraries[THEIRS] = {"": dict(STANDARD) if options.peer == "standard" else given}
    if options.only != "sb3":
        libraries[OURS] = variants
    common = {"steps": options.steps, "episodes": options.episodes, "commit": options.commit or report.commit()}
    return [
        {"task": task, "library": library, "variant": variant, "seed": seed, "options": chosen, **common}
        for library, of_library in libraries.items()
        for seed in options.seeds
        for variant, chosen in of_library.items()
        for task in options.task or PRESETS
    ]


def read(path: Path) -> list[Row]:
    """Read the results so far; the line that a killed call was writing is taken out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    if len(whole) < len(lines):
        path.write_text("".join(whole))
    return [json.loads(line) for line in whole]


def run_all(jobs: list[Job], processes: int, path: Path) -> list[Row]:
    """Run what the file does not hold yet, append each result when it is there, and return all in the jobs' order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.environ.update(OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")  # inherited by the processes
    known = {key(row): row for row in read(path)}
    missing = [job for job in jobs if key(job) not in known]
    print(f"{len(missing)} of {len(jobs)} runs to do, {processes} at a time; results go to {path}", flush=True)
    if missing:
        with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool, path.open("a") as file:
            for row in pool.imap_unordered(run, missing):
                if "error" in row:
                    print(f"{row['task']} {row['library']} {row['variant']} seed {row['seed']}: {row['error']}")
                    continue
                file.write(json.dumps(row) + "\n")
                file.flush()
                known[key(row)] = row
                print(
                    f"{row['task']:15} {row['library']:18} {row['variant'][:40]:20} seed {row['seed']:4}  "
                    f"deterministic {row['return']:8.1f}  sampled {row['sampled']:8.1f}  {row['seconds']:5.0f} s"
                    f"{'  stuck' if is_stuck(row) else ''}",
                    flush=True,
                )
    if lost := [job for job in jobs if key(job) not in known]:
        raise SystemExit(f"{len(lost)} of {len(jobs)} runs failed; the same command tries them again.")
    return [known[key(job)] for job in jobs]


def summarize(rows: list[Row]) -> list[dict[str, Any]]:
    """Return one entry a task, library and variant: both returns, their medians, and the number of stuck runs."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["library"], row["variant"]), []).append(row)
    summary = []
    for (task, library, variant), group in sorted(groups.items()):
        entry: dict[str, Any] = {"task": task, "library": library, "variant": variant, "runs": len(group)}
        for name in ("return", "sampled"):
            values = np.array([row[name] for row in group])
            error = float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")
            entry |= {name: float(values.mean()), f"{name}_error": error, f"{name}_median": float(np.median(values))}
        summary.append({**entry, "stuck": sum(map(is_stuck, group))})
    return summary


def difference(rows: list[Row], task: str) -> dict[str, float]:
    """Return ours minus theirs with 95 % intervals of Welch's t; the seeds of the two have nothing in common."""
    found = {}
    for name in ("return", "sampled"):
        first, second = (
            np.array([row[name] for row in rows if row["task"] == task and row["library"] == library])
            for library in (OURS, THEIRS)
        )
        interval = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
        found[f"{name}_difference"] = float(first.mean() - second.mean())
        found |= {f"{name}_low": float(interval.low), f"{name}_high": float(interval.high)}
    return found


def record(
    rows: list[Row], summary: list[Row], differences: dict[str, dict[str, float]], options: argparse.Namespace
) -> dict[str, Any]:
    """Return what ``benchmarks/ppo_learning.json`` holds: every run, the presets, and the figures of the table."""
    kept = ("task", "library", "variant", "seed", "return", "sampled", "seconds")
    return {
        "steps": options.steps,
        "episodes": options.episodes,
        "seeds": options.seeds,
        "peer": options.peer,
        "stuck": {
            library: sum(is_stuck(row) for row in rows if row["library"] == library) for library in (OURS, THEIRS)
        },
        "rows": [{name: row[name] for name in kept if row[name] != ""} for row in rows],
        "difference": differences,
        "summary": summary,
        "set": options.set,
        "presets": {task: load_config(PRESETS[task]).to_dict() for task in options.task or PRESETS},
    }


def table(summary: list[dict[str, Any]], differences: dict[str, dict[str, float]]) -> str:
    """Return the summary in Markdown."""
    lines = ["| task | | deterministic | sampled | stuck |", "|---|---|---|---|---|"]
    for entry in summary:
        cells = [
            f"{entry[name]:,.0f} ± {entry[f'{name}_error']:,.0f}, median {entry[f'{name}_median']:,.0f}"
            for name in ("return", "sampled")
        ]
        who = " ".join(filter(None, (entry["library"], entry["variant"])))
        lines.append(f"| {entry['task']} | {who} | {' | '.join(cells)} | {entry['stuck']} of {entry['runs']} |")
    for task, found in differences.items():
        cells = [
            f"{found[f'{name}_difference']:+,.0f} ({found[f'{name}_low']:+,.0f} to {found[f'{name}_high']:+,.0f})"
            for name in ("return", "sampled")
        ]
        lines.append(f"| {task} | difference and its 95 % interval | {' | '.join(cells)} | |")
    return "\n".join(lines)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--task", action="append", choices=tuple(PRESETS), help="may be given several times; all when not given")
    add("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=list(SEEDS))
    add("--steps", type=int, default=300_000)
    add("--episodes", type=int, default=20)
    add("--jobs", type=int, default=1, help="runs side by side, each on one thread")
    add("--only", choices=("ours", "sb3"), help="run one library; writes no record")
    add("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="change the presets")
    add("--variant", action="append", metavar="'NAME FIELD=VALUE …'", help="one of several changes of our presets")
    add("--peer", choices=("preset", "standard"), default="preset", help="hyper-parameters of Stable-Baselines3")
    add("--no-compile", action="store_true", help="run ours without torch.compile")
    add("--out", type=Path, default=Path("output/ppo_learning.jsonl"), help="results, and where to continue")
    add("--record", type=Path, help="where the JSON goes; benchmarks/ppo_learning.json when not given")
    add("--commit", help="where git does not know it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = run_all(make_jobs(options), options.jobs, options.out)
    summary = summarize(rows)
    differences = {}
    if options.only is None and len(options.seeds) > 1:
        differences = {task: difference(rows, task) for task in options.task or PRESETS}
    print(table(summary, differences))
    if options.only is None:
        content = record(rows, summary, differences, options)
        print(f"wrote {report.write('ppo_learning', content, path=options.record, commit=options.commit)}")


if __name__ == "__main__":
    main()
