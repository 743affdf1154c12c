"""The default run, ten seeds: does the robot walk, and how long does it take?

    python benchmarks/first_robot.py [PRESET] [--seeds 10] [--cold] [--section.key VALUE …]

Each seed is a whole ``apexrl train`` with two threads: start of the interpreter, compilation, training, the evaluation
of 100 episodes, curve and video. Seconds are by the clock and of the processor. With --cold every seed finds no
compiled code, without it the second and later ones find that of the first. The record is written after each seed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report

from apexrl.run.sources import DEFAULT_PRESET

FIELDS = {"return": "return", "forward_speed": "speed, m/s", "tracking_error": "speed error, m/s"}
"""Episode fields that are shown as they are."""
ENOUGH, CLOSE, SECONDS = 0.9, 0.25, 180.0
"""Share of episodes without a fall and mean error of the speed (m/s) with which a seed walks, and seconds of a run."""


def train(preset: str, seed: int, run_dir: Path, cache: Path, more: list[str]) -> dict[str, Any]:
    """Train one seed; return what its evaluation found and how long it took."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "XDG_CACHE_HOME": str(cache)}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
    words = [sys.executable, "-m", "apexrl.cli", "train", preset, "--run-dir", str(run_dir), f"--training.seed={seed}"]
    words += more
    before, started = os.times(), time.perf_counter()
    subprocess.run(words, env=environment, stdout=subprocess.DEVNULL, check=True)
    seconds, after = time.perf_counter() - started, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    found = json.loads((run_dir / "evaluations.jsonl").read_text().splitlines()[-1])
    row = {"seed": seed, "episodes": found["episodes"], "without a fall": 1.0 - found["fail_once"]}
    row |= {title: found[name] for name, title in FIELDS.items() if name in found}
    return row | {"steps": found["step"], "seconds": round(seconds, 1), "processor seconds": round(used, 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("preset", nargs="?", default=DEFAULT_PRESET)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--cold", action="store_true")
    options, more = parser.parse_known_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(options.seeds):
            cache = Path(scratch) / (f"cache{seed}" if options.cold else "cache")
            rows.append(train(options.preset, seed, Path(scratch) / f"run{seed}", cache, more))
            print(json.dumps(rows[-1]), flush=True)
            # A robot that stands still does not fall either.
            follows = [row.get(FIELDS["tracking_error"], 0.0) <= CLOSE for row in rows]
            walk = sum(row["without a fall"] >= ENOUGH and close for row, close in zip(rows, follows, strict=True))
            quick = sum(row["seconds"] <= SECONDS for row in rows)
            result = {"seeds that walk": walk, "seeds within three minutes": quick, "of": len(rows)}
            report.write("first_robot", {"preset": options.preset, "result": result, "rows": rows})
    print(json.dumps(result))


if __name__ == "__main__":
    main()
