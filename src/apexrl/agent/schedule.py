"""How long a run trains, how often it is evaluated and saved, and which seeds it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from apexrl.agent.stop_when import Condition
from apexrl.core.system import distributed
from apexrl.core.system.seeding import ENV, spawn_seed
from apexrl.core.validation import Count, Integer, NonNegative, NonNegativeInteger, Positive, options

EVAL_SEED_OFFSET = 1_000_003
"""Evaluation episodes are drawn from seeds that training does not use."""


@options("training")
class TrainingConfig:
    """Schedule of a run. Intervals count iterations; an iteration is one rollout and one update."""

    total_timesteps: Count = 1_000_000
    """Environment steps, summed over environments, after which training ends. More take longer and usually end
    better; usually 1e5 to 1e8."""
    num_train_steps: NonNegativeInteger = 0
    """Iterations after which training ends, whatever their steps; 0 leaves it to total_timesteps."""
    seed: Annotated[Integer, Field(ge=0, le=2**31)] = 0
    """Of the environments; ``apexrl train`` also seeds the initial weights and the sampling with it."""
    device: str = "auto"
    """Of the policy and the tasks that ship: auto, cpu, cuda, cuda:1. Read by ``apexrl train``, not by Trainer."""
    num_threads: Annotated[Integer, Field(ge=0, le=1024)] = 1
    """CPU threads of PyTorch; 0 leaves its default, 1 suits small nets. Read by ``apexrl train``, not by Trainer."""
    init_from: str = ""
    """A run directory or checkpoint whose policy weights a new run starts from; a resumed run continues with its own.
    Read by ``apexrl train``, not by Trainer."""
    collector: Literal["sync", "async", "ray"] = "sync"
    """sync: collect, then learn; async: collect in a thread while learning, for simulators in worker processes; ray:
    collect in Ray's workers, on this machine or a cluster. Read by ``apexrl train``, not by Trainer."""
    num_collectors: Count = 2
    """Ray workers that share task.num_envs evenly; only for ray."""
    max_staleness: NonNegativeInteger = 1
    """How many updates old the weights may be that collected a rollout; only for async and ray."""
    step_timeout: Positive = 60.0
    """Seconds after which an environment step counts as hanging; only for async."""
    save_interval: NonNegativeInteger = 50
    """Iterations between checkpoints; 0 saves only at the end."""
    save_minutes: NonNegative = 10.0
    """Minutes after which a checkpoint is saved before its turn, at the end of an iteration; 0 never does."""
    keep_checkpoints: NonNegativeInteger = 3
    """Checkpoints saved on schedule that stay; older ones are deleted, never one saved by name. 0 keeps all."""
    eval_interval: NonNegativeInteger = 0
    """Iterations between evaluations on separate environments. Smaller draws a finer curve but takes time; usually
    10 to 100; 0 evaluates only at the end."""
    eval_episodes: Count = 20
    """Episodes of each periodic evaluation."""
    eval_sampled: bool = False
    """Evaluate a second time with sampled actions, and report their return beside the deterministic one."""
    eval_num_envs: Count = 10
    """Environments of an evaluation; never more than its episodes."""
    final_eval_episodes: NonNegativeInteger = 100
    """Episodes of the evaluation at the end; 0 skips it."""
    stop_when: str | None = None
    """Early stopping: training ends when a logged number reaches a threshold, such as "eval/success_rate >= 0.95" (with
    eval_interval) or "rollout/return > 400"; one of >=, <=, > and <. null: never."""

    def __post_init__(self) -> None:
        if self.stop_when:
            Condition.parse(self.stop_when)


@dataclass
class Counters:
    """How far a run is."""

    iteration: int = 0
    """Finished iterations."""
    total_steps: int = 0
    """Environment steps so far, summed over environments."""
    num_evaluations: int = 0
    optimizer_steps: int | None = 0
    """Optimizer steps so far; None where the algorithm does not report them (``updates``)."""
    stopped_by: str = ""
    """The condition ``stop_when`` that ended training."""


def env_seed(seed: int, total_steps: int = 0) -> int:
    """Return the seed of this process's environments, which start, or start again, after so many steps of a run."""
    return spawn_seed(seed, ENV, distributed.rank(), total_steps)
