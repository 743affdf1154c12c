"""Post-training one language-conditioned policy: on all of Meta-World MT10, or on one task that it sees by camera.

    python benchmarks/mt10.py [--demos 1,10] [--heads likelihood,flow] [--iterations 40] [--workers 4] [--seed 0]
    python benchmarks/mt10.py --presets camera --demos 2 --heads likelihood
    python benchmarks/mt10.py --directory DIR ...               keeps demonstrations and weights there
    python benchmarks/mt10.py --teacher DIR/flow-10/rloo.pt ... lets weights kept there demonstrate
    python benchmarks/mt10.py --draw docs/images/mt10.png       shows and draws what was measured last

Every combination asked for at once is a process of its own: presets ``mt10_bc``, then ``mt10_rloo`` from its weights;
with ``--presets camera`` these are ``camera_bc`` and ``camera_rloo``: images, proprioception and instruction alone.
Success is deterministic, over 50 held-out initial states of each task (400 of the one seen by camera): neither
demonstrations nor rollouts start from these.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import report
import torch

from apexrl.agent import checkpoint
from apexrl.collectors.demonstrations.record import record_demos
from apexrl.envs.suites.env import SuiteVecEnv
from apexrl.envs.suites.metaworld import MetaWorldSuite
from apexrl.evaluation.evaluate import EvaluationResult, evaluate
from apexrl.run.build import make_trainer
from apexrl.run.loading import load_config
from apexrl.run.suite import SuiteConfig
from apexrl.run.trained_policy import load_trained

PER_TASK = {"mt10": 50, "camera": 400}


def settings(head: str, workers: int, seed: int, more: dict[str, Any]) -> list[tuple[str, str]]:
    values = {
        "policy.head": head,
        "task.num_workers": workers,
        "training.seed": seed,
        "logging.tensorboard": "false",
        "training.save_interval": 0,
        "logging.log_freq": 0,
        **more,
    }
    return [(name, str(value)) for name, value in values.items()]


def held_out_env(task: Any, device: torch.device, options: dict[str, Any]) -> SuiteVecEnv:
    """Make what success is measured on; to start its processes takes as long as to simulate, so it stays open."""
    assert isinstance(task, SuiteConfig)
    env = task.make_env(device, options["envs"])
    assert isinstance(env.suite, MetaWorldSuite)
    env.suite.num_init_states = PER_TASK[options["presets"]]
    return env


def held_out(env: SuiteVecEnv, trainer: Any) -> EvaluationResult:
    return evaluate(env, trainer.policy, env.num_distinct_episodes, deterministic=True)


def per_task(result: EvaluationResult) -> dict[str, Any]:
    found: dict[str, Any] = result.record()["per_task"]
    return found


def run(head: str, demos: int, directory: str, options: dict[str, Any]) -> dict[str, Any]:
    """Imitate, then post-train; returns success before and after, and the curve between."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    started, place = time.perf_counter(), Path(directory) / f"{head}-{demos}"
    more = {"task.demos": f"{directory}/demos-{demos}", **options["overrides"]}
    base = settings(head, options["workers"], options["seed"], more)
    name, weights = f"{demos:2} demos, {head:10}", place / "bc.pt"
    if not weights.exists():
        (place / "bc").mkdir(parents=True, exist_ok=True)
        bc = make_trainer(load_config(f"{options['presets']}_bc", [*base, *options["bc"]]), place / "bc")
        bc.learn()
        bc.save_checkpoint(str(weights))
        bc.close()
    config = load_config(f"{options['presets']}_rloo", [*base, *options["rloo"]])
    rloo = make_trainer(config, Path(tempfile.mkdtemp(dir=place)), init_from=str(weights))
    tests = held_out_env(config.task, rloo.policy.device, options)
    start = held_out(tests, rloo)
    print(f"{name} BC {100 * start.mean('success_once'):5.1f} %  {time.perf_counter() - started:4.0f} s", flush=True)
    curve: list[dict[str, float]] = []

    def note(trainer: Any, stats: dict[str, float]) -> None:
        point = {"iteration": trainer.iteration, "steps": trainer.total_steps, "seconds": time.perf_counter() - started}
        point["sampled"] = stats.get("rollout/success_rate", float("nan"))
        if trainer.iteration % options["every"] == 0:
            point["held_out"] = held_out(tests, trainer).mean("success_once")
            print(
                f"{name} iteration {trainer.iteration:3}  sampled {100 * point['sampled']:5.1f} %  held out "
                f"{100 * point['held_out']:5.1f} %  {point['steps']:9,} steps  {point['seconds']:4.0f} s",
                flush=True,
            )
        curve.append(point)

    rloo.add_callback("post_iteration", note)
    wanted = rloo.cfg.num_train_steps
    while rloo.iteration < wanted and time.perf_counter() - started < options["seconds"]:
        rloo.cfg = replace(rloo.cfg, num_train_steps=rloo.iteration + 1)
        rloo.learn()
    end = held_out(tests, rloo) if curve else start
    rloo.save_checkpoint(str(place / "rloo.pt"))
    rloo.close()
    tests.close()
    seconds = time.perf_counter() - started
    print(f"{name} RLOO {100 * end.mean('success_once'):5.1f} %  {seconds:4.0f} s", flush=True)
    return {
        "head": head,
        "demos": demos,
        "seed": options["seed"],
        "seconds": seconds,
        "bc": start.mean("success_once"),
        "rloo": end.mean("success_once"),
        "bc_tasks": per_task(start),
        "rloo_tasks": per_task(end),
        "curve": curve,
        "config": config.to_dict(),
        "imitation": checkpoint.load(weights)["config"]["algo"],
    }


def demonstrate(suite: MetaWorldSuite, directory: Path, count: int, teacher: Path | None) -> None:
    """Record the scripted experts, or a policy that this benchmark trained before, perhaps from states."""
    plans = None
    if teacher is not None:
        trained = load_trained(teacher)
        assert isinstance(trained.config.task, SuiteConfig)
        suite.horizon = trained.config.task.max_episode_length or suite.horizon
        suite.num_init_states = max(suite.num_init_states, 5 * count // 4)  # for it may fail from some
        plans = trained.plans(suite, count, num_workers=suite.num_tasks)
    record_demos(suite, directory, count, num_workers=suite.num_tasks, plans=plans)


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(f"{row['demos']} demonstrations a task, {row['head']}: {row['seconds']:.0f} s")
        for name, before in row["bc_tasks"].items():
            after = row["rloo_tasks"][name]
            shown = [
                f"{100 * task['success_rate']:5.1f} % ({100 * task['interval'][0]:3.0f} to "
                f"{100 * task['interval'][1]:3.0f})"
                for task in (before, after)
            ]
            print(f"  {name:26} BC {shown[0]}   RLOO {shown[1]}")
        removed = 1 - (1 - row["rloo"]) / max(1e-9, 1 - row["bc"])
        print(
            f"  {'mean':26} BC {100 * row['bc']:5.1f} %              RLOO {100 * row['rloo']:5.1f} %, "
            f"{100 * removed:.0f} % of the failures removed"
        )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(rows), figsize=(4.2 * len(rows), 4), sharey=True, squeeze=False)
    for axis, row in zip(axes[0], rows, strict=True):
        names = list(row["bc_tasks"])
        for shift, color, key in ((-0.2, "C7", "bc_tasks"), (0.2, "C0", "rloo_tasks")):
            rates = [100 * row[key][name]["success_rate"] for name in names]
            bounds = [[100 * bound for bound in row[key][name]["interval"]] for name in names]
            errors = [
                [max(0.0, r - b[0]) for r, b in zip(rates, bounds, strict=True)],
                [max(0.0, b[1] - r) for r, b in zip(rates, bounds, strict=True)],
            ]
            places = [index + shift for index in range(len(names))]
            label = {"bc_tasks": "imitation", "rloo_tasks": "RLOO"}[key]
            axis.barh(places, rates, 0.38, xerr=errors, color=color, label=label, error_kw={"elinewidth": 0.8})
        axis.set_yticks(range(len(names)), names)
        axis.set(xlim=(0, 101), xlabel="success, %", title=f"{row['demos']} demonstration(s), {row['head']}")
        axis.grid(axis="x", alpha=0.3)
    axes[0][0].invert_yaxis()
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="mt10", choices=("mt10", "camera"))
    parser.add_argument("--demos", default="1,10")
    parser.add_argument("--heads", default="likelihood,flow")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--updates", type=int, default=4000, help="gradient steps of BC")
    parser.add_argument("--workers", type=int, default=4, help="simulating processes of each run")
    parser.add_argument("--envs", type=int, default=40, help="held-out episodes side by side")
    parser.add_argument("--every", type=int, default=10, help="iterations between held-out evaluations")
    parser.add_argument("--seconds", type=float, default=1e9, help="no iteration begins later than this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other settings of rloo")
    parser.add_argument("--set-bc", nargs="*", default=[], metavar="NAME=VALUE", help="other settings of bc")
    parser.add_argument("--set-both", nargs="*", default=[], metavar="NAME=VALUE", help="other settings of both")
    parser.add_argument("--directory", type=Path, help="keeps demonstrations and weights, for later runs too")
    parser.add_argument("--teacher", type=Path, help="weights of another run (rloo.pt) that demonstrates")
    parser.add_argument("--record", help="name of the record; empty writes none, the presets' name if not given")
    parser.add_argument("--draw", type=Path, help="show and draw into this file what was measured last")
    options = parser.parse_args()
    record = options.presets if options.record is None else options.record
    if options.draw:
        rows = json.loads((Path(__file__).parent / f"{record}.json").read_text())["rows"]
        show(rows)
        draw(rows, options.draw)
        return
    pairs = {name: [tuple(word.split("=", 1)) for word in words] for name, words in (
        ("rloo", options.set), ("bc", options.set_bc), ("both", options.set_both)
    )}  # fmt: skip
    common = {
        "presets": options.presets,
        "workers": options.workers,
        "envs": options.envs,
        "every": options.every,
        "seconds": options.seconds,
        "seed": options.seed,
        "overrides": dict(pairs["both"]),
        "bc": [("algo.num_updates", str(options.updates)), *pairs["bc"]],
        "rloo": [("training.num_train_steps", str(options.iterations)), *pairs["rloo"]],
    }
    heads, counts = options.heads.split(","), [int(count) for count in options.demos.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        directory = str((options.directory or Path(temporary)).resolve())
        started = time.perf_counter()
        task = load_config(f"{options.presets}_bc", list(dict(pairs["both"]).items())).task
        assert isinstance(task, SuiteConfig)
        suite = task.make_suite()
        assert isinstance(suite, MetaWorldSuite)
        for count in counts:
            if not Path(f"{directory}/demos-{count}").exists():
                demonstrate(suite, Path(f"{directory}/demos-{count}"), count, options.teacher)
        print(f"demonstrations recorded in {time.perf_counter() - started:.0f} s", flush=True)
        jobs = [(head, count, directory, common) for count in counts for head in heads]
        with multiprocessing.get_context("spawn").Pool(len(jobs), maxtasksperchild=1) as pool:
            rows = pool.starmap(run, jobs, chunksize=1)
    show(rows)
    if record:
        print(f"wrote {report.write(record, {'rows': rows})}")


if __name__ == "__main__":
    main()
