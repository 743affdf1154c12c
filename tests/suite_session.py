"""Two quick Meta-World tasks as users meet them: demonstrations, a policy imitated from them, options of short runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from apexrl.cli.main import main
from apexrl.collectors.demonstrations.record import record_demos
from apexrl.envs.suites import make_suite

TASKS = ("handle-press-v3", "handle-press-side-v3")
BC = """
task: {{demos: {demos}}}
policy:
  kind: mlp
  hidden_dims: [64]
  actor_groups: [state]
  init_std: 0.6
  normalize_obs: true
algo: {{name: bc, num_updates: 200, batch_size: 64}}
logging: {{log_interval: 50}}
features: {{save_video: false}}
"""
"""A file of a user: imitation with the networks of RLOO below."""
SMALL = {
    "task.benchmark_name": "mt50",
    "task.task_names_to_use": f"[{', '.join(TASKS)}]",
    "task.num_parallel_envs": "4",
    "task.num_workers": "0",
    "task.max_episode_length": "45",
    "training.eval_episodes": "4",
    "training.eval_num_envs": "2",
    "training.final_eval_episodes": "0",
    "training.device": "cpu",
    "features.save_plot": "false",
}
"""Of every run here, whatever its algorithm."""
RLOO = {
    **SMALL,
    "policy.kind": "mlp",
    "policy.hidden_dims": "[64]",
    "policy.actor_groups": "[state]",
    "policy.init_std": "0.6",
    "policy.normalize_obs": "true",
    "algo.imitation_updates": "0",
    "algo.rloo_batch_size": "4",
    "algo.num_groups": "2",
    "algo.num_epochs": "1",
    "algo.max_attempts": "2",
    "training.num_train_steps": "2",
    "logging.log_freq": "0",
}
"""On top of the preset stage11_ript_vla: a small mlp instead of its vla, without its imitation."""
FAILING = {"task.max_episode_length": "10"}
"""Too short for any success."""


def options(values: dict[str, str]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", value)]


def train(source: str, run_dir: Path, values: dict[str, str], **more: str) -> int:
    """Run ``apexrl train`` in this process; ``more`` has two underscores for a dot."""
    named = {**values, **{name.replace("__", "."): value for name, value in more.items()}}
    return main(["train", source, "--run-dir", str(run_dir), *options(named)])


def record(directory: Path) -> Path:
    """Record two demonstrations of each task."""
    record_demos(make_suite("mt50", TASKS), directory, 2)
    return directory


def imitate(directory: Path) -> Path:
    """Record demonstrations, and train a policy that presses the handles now and then; returns its run."""
    file = directory / "bc.yaml"
    file.write_text(BC.format(demos=record(directory / "demos")), encoding="utf-8")
    assert train(str(file), directory / "bc", SMALL) == 0
    return directory / "bc"


def entries(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))
