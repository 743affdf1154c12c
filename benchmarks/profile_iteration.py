"""Profile of one iteration on a GPU: phases, and the kernels inside them.

    python benchmarks/profile_iteration.py [--envs 4096] [--top 25]

Writes benchmarks/profile_iteration.json; ``--draw`` makes docs/images/profile.png from it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch
from ppo_gpu import STEPS, make_ours

from apexrl.core.system.acceleration import Acceleration

MODES = {
    "eager": Acceleration(precision="tf32", graphs=False),
    "graphs": Acceleration(precision="tf32"),
    "graphs, compiled": Acceleration(precision="tf32", compile=True),
    "graphs, compiled, bf16": Acceleration(precision="bf16", compile=True),
}


def seconds(function: Callable[[], Any], repeats: int = 20) -> float:
    function()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats


def profile(name: str, num_envs: int, top: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_ours(num_envs, MODES[name], Path(directory))
        times: list[float] = []
        trainer.add_callback("post_iteration", lambda *_: times.append(time.perf_counter()))
        trainer.learn(40 * STEPS * num_envs)
        collect = seconds(lambda: trainer.collector.collect(STEPS))
        batch = trainer.collector.collect(STEPS)
        update = seconds(lambda: trainer.algorithm.update(batch))
        whole = (times[-1] - times[9]) / (len(times) - 10)
        phases = {"rollout": collect, "update": update, "logs and the rest": whole - collect - update}
        print(
            name,
            {key: f"{1e3 * value:.2f} ms" for key, value in phases.items()},
            f"whole {1e3 * whole:.2f} ms",
            flush=True,
        )
        if top:
            activities = [torch.profiler.ProfilerActivity.CUDA]
            for phase, run in (
                ("rollout", lambda: trainer.collector.collect(STEPS)),
                ("update", lambda: trainer.algorithm.update(batch)),
            ):
                with torch.profiler.profile(activities=activities) as record:
                    run()
                    torch.cuda.synchronize()
                rows = sorted(record.key_averages(), key=lambda row: -row.device_time_total)
                busy = sum(row.device_time_total for row in rows)
                print(f"  {phase}: {sum(row.count for row in rows)} kernels, {busy / 1e3:.2f} ms busy")
                for row in rows[:top]:
                    print(f"    {row.device_time_total / 1e3:8.3f} ms {row.count:6d} x {row.key[:110]}", flush=True)
        return phases


def draw(path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    content = json.loads((Path(__file__).parent / "profile_iteration.json").read_text())
    figure, axis = plt.subplots(figsize=(8, 2.8))
    for row, (_, phases) in enumerate(content["modes"].items()):
        left = 0.0
        for index, value in enumerate(phases.values()):
            axis.barh(row, 1e3 * value, left=1e3 * left, color=f"C{index}")
            left += value
        axis.text(1e3 * left, row, f" {1e3 * left:.1f} ms", va="center", fontsize=8)
    axis.set_yticks(range(len(content["modes"])), list(content["modes"]))
    axis.invert_yaxis()
    axis.legend(list(next(iter(content["modes"].values()))), fontsize=8)
    axis.set_xlabel(f"milliseconds an iteration, {content['envs']} environments, {content['machine']['gpu']}")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, default=4096)
    parser.add_argument("--top", type=int, default=0, help="also list this many kernels of each phase")
    parser.add_argument("--modes", default=";".join(MODES))
    parser.add_argument("--draw", type=Path, metavar="PNG")
    options = parser.parse_args()
    if options.draw:
        draw(options.draw)
        return
    modes = {name: profile(name, options.envs, options.top) for name in options.modes.split(";")}
    print(f"wrote {report.write('profile_iteration', {'envs': options.envs, 'modes': modes})}")


if __name__ == "__main__":
    main()
