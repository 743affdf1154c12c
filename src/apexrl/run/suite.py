"""Suites of language-conditioned tasks: what a run on one has beside any other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import Field
from tensordict import TensorDict

from apexrl.agent import Trainer, checkpoint
from apexrl.agent.loggers import Logger
from apexrl.agent.schedule import env_seed
from apexrl.algorithms import AlgorithmConfig, BaseAlgorithm
from apexrl.collectors import (
    AsyncCollector,
    BaseCollector,
    DemoCollector,
    RolloutGenerator,
    RolloutStats,
    SuiteRunner,
)
from apexrl.collectors.demonstrations.record import Recorded, record_demos
from apexrl.collectors.demonstrations.samples import SUFFIX, load_demos
from apexrl.collectors.init_states import read_statistics
from apexrl.core.errors import ConfigError, EnvError, ExportError, plural
from apexrl.core.system import distributed
from apexrl.core.system.acceleration import Acceleration
from apexrl.core.system.files import read_json_lines, write_json
from apexrl.core.validation import Count, Integer, NonNegativeInteger, Positive, options
from apexrl.envs.mujoco.simulation import num_cores
from apexrl.envs.suites import TaskSuite, make_suite
from apexrl.envs.suites.env import SuiteVecEnv
from apexrl.run.records import is_count

if TYPE_CHECKING:
    from apexrl.run.config import Config

MAX_SUITE_SIZE = 4096
"""Beyond what any machine holds: a typing mistake, better refused than tried."""
SuiteSize = Annotated[Integer, Field(ge=1, le=MAX_SUITE_SIZE)]
METRICS_FILE, FINAL_RESULTS, ROLLOUT_STATS = "metrics.json", "final_training_results.json", "rollout_stats.json"
FIRST_ROLLOUT_STATS = ".rollout_stats_at_start.json"
"""What was known of the init states when the run began."""
DEMOS, IMITATION = "demos", "imitation"
"""Directories of a run: demonstrations that it recorded itself, and the imitation of them before its first rollout."""


@options("task")
class SuiteConfig:
    """A suite of language-conditioned tasks to train on, for rloo and bc; chosen by ``task.benchmark_name``."""

    collectors: ClassVar[Mapping[str, tuple[str, ...]]] = {"groups": ("sync", "async"), "demonstrations": ("sync",)}

    benchmark_name: str = "mt10"
    """mt10, mt50, metaworld, metaworld:TASK, or libero_spatial, libero_object, libero_goal, libero_10, libero_90."""
    task_names_to_use: tuple[str, ...] | None = ()
    """Tasks of the suite; empty or null for all."""
    num_parallel_envs: SuiteSize = 8
    """Episodes that run side by side, with one inference for all."""
    num_workers: NonNegativeInteger | None = None
    """Processes that simulate; null: one per core (one per episode when rendering); 0 simulates here."""
    max_cached_envs: SuiteSize | None = None
    """Simulators that a process keeps, one per task; beyond that the least recently used one is closed; null for 64.
    When rendering, of all processes together, at least one for each episode that runs; null for 4."""
    random_init: bool = False
    """Start the episodes of training from random states (Meta-World) instead of the suite's fixed set, which papers
    use; evaluation keeps its own."""
    reuse_envs: bool = True
    """Keep the simulators of training for the next batch; false creates those of every batch again."""
    max_episode_length: Count | None = None
    """Control steps of an episode; null for the suite's own."""
    chunk_size: SuiteSize = 5
    """Actions that the policy gives at once."""
    cameras: tuple[str, ...] = ()
    """Images that the policy sees, such as corner2 (Meta-World), or agentview and eye_in_hand (LIBERO)."""
    image_size: SuiteSize = 64
    """Width and height of the images in pixels."""
    privileged: bool = True
    """Let the state hold the places of objects and goal where the suite knows them; false: proprioception only."""
    step_timeout: Positive = 120.0
    """Seconds after which a simulator that does not answer is replaced and its episode discarded."""
    demos: str = ""
    """Directory of demonstrations that ``apexrl demos`` made, or one file, whose task alone is then imitated; for bc,
    and for rloo with imitation_updates or imitation_coef."""
    num_demos: NonNegativeInteger = 0
    """Demonstrations of each task that a run records itself with the suite's scripted experts, into demos in the run
    directory, where task.demos is empty; usually 1 to 50, more make imitation better; 0 records none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "task_names_to_use", self.task_names_to_use or ())
        if self.num_workers is not None and self.num_workers > self.num_parallel_envs:
            raise ConfigError(
                f"task.num_workers must be null or lie between 0 and task.num_parallel_envs "
                f"({self.num_parallel_envs}), got {self.num_workers}."
            )

    @property
    def id(self) -> str:
        """The suite."""
        return self.benchmark_name

    @property
    def num_envs(self) -> int:
        """Episodes that run side by side."""
        return self.num_parallel_envs

    @property
    def options(self) -> dict[str, Any]:
        """``max_episode_length``, when it is not the suite's own."""
        return {} if self.max_episode_length is None else {"max_episode_length": self.max_episode_length}

    @property
    def records_demos(self) -> bool:
        """Whether ``num_demos`` are wanted."""
        return bool(self.num_demos and not self.demos)

    def check(self, config: Config) -> None:
        """Raise when there are no demonstrations to imitate, or another collector is wanted than suites have."""
        if config.imitation is not None and not (self.num_demos or self.demos):
            raise ConfigError(
                "algo.imitation_updates needs demonstrations: set task.num_demos to record some with the suite's "
                f"scripted experts, or task.demos to a directory of them; got {self.num_demos} and ''."
            )
        known = self.collectors[config.algorithm.learns_from]
        if config.training.collector not in known:
            raise ConfigError(
                f"training.collector must be {' or '.join(known)} with task.benchmark_name and algo.name "
                f"{config.algo.name}, got '{config.training.collector}'."
            )

    def with_options(self, options: Mapping[str, Any]) -> SuiteConfig:
        """Return the suite with this ``max_episode_length``."""
        if unknown := options.keys() - {"max_episode_length"}:
            raise ConfigError(f"The manifest has options that no suite has: {', '.join(sorted(unknown))}.")
        return replace(self, max_episode_length=options.get("max_episode_length"))

    def share(self) -> SuiteConfig:
        """Return the suite with a share of the environments and workers."""
        workers = self.num_workers and -(-self.num_workers // distributed.world_size())
        count = distributed.share(self.num_parallel_envs, "task.num_parallel_envs")
        return replace(self, num_parallel_envs=count, num_workers=workers)

    def make_env_on(self, suite: TaskSuite, device: torch.device | str, num_workers: int) -> SuiteVecEnv:
        """Create environments of another suite with the same options."""
        num_envs = min(self.num_parallel_envs, num_workers) if self.cameras else self.num_parallel_envs
        task = replace(
            self,
            benchmark_name=suite.name,
            task_names_to_use=tuple(suite.task_names),
            num_parallel_envs=num_envs,
            num_workers=min(num_workers, num_envs),
            max_cached_envs=None,
            max_episode_length=suite.horizon,
        )
        return task.make_env(device)

    def make_suite(self, **options: Any) -> TaskSuite:
        """Create the suite."""
        if not self.benchmark_name.startswith("libero"):
            options["privileged"] = self.privileged
        options |= {"cameras": self.cameras, "image_size": self.image_size}
        return make_suite(self.benchmark_name, self.task_names_to_use, **options)

    def make_env(self, device: torch.device | str, num_envs: int | None = None) -> SuiteVecEnv:
        """Create environments of training, or ``num_envs`` of an evaluation, whose episodes start in validation states.

        No simulator is created before the first reset.
        """
        count = num_envs or self.num_parallel_envs
        return SuiteVecEnv(
            self.make_suite(),
            count,
            chunk=self.chunk_size,
            num_workers=None if self.num_workers is None else min(self.num_workers, count),
            max_cached_envs=self.max_cached_envs,
            split="val" if num_envs else "train",
            max_steps=self.max_episode_length,
            device=device,
            step_timeout=self.step_timeout,
        )

    def make_collector(
        self, config: Config, env: Any, algorithm: BaseAlgorithm, acceleration: Acceleration, run_dir: Path
    ) -> BaseCollector:
        """Create a collector of groups of episodes, in this thread or in another, or of demonstrations."""
        cfg: Any = config.algo
        samples = self._read_demos(run_dir, env, cfg.demo_reader) if cfg.demo_reader else None
        if samples is not None:
            algorithm.remember(samples, is_new=not config.training.init_from)
            if algorithm.learns_from == "demonstrations":
                return DemoCollector(samples.to(algorithm.policy.device), cfg.batch_size)
        path = Path(cfg.rollout_stats_path) if cfg.rollout_stats_path else run_dir / ROLLOUT_STATS
        own_path = path if distributed.is_main_process() else process_dir(run_dir, distributed.rank()) / ROLLOUT_STATS
        generator = RolloutGenerator.from_config(
            SuiteRunner(env, algorithm.policy, random_init=self.random_init),
            cfg,
            rollout_stats_path=own_path,
            reuse_envs=self.reuse_envs,
            seed=env_seed(config.training.seed),
        )
        if (stats := generator.stats) is not None:
            # The first process creates the directory, and clears it when it fails: the others write there afterwards.
            distributed.on_main_process(lambda: begin_statistics(stats, run_dir, path))
            if not distributed.is_main_process():
                begin_statistics(stats, run_dir, path)
        if config.training.collector == "sync":
            return generator
        max_staleness = config.training.max_staleness
        return AsyncCollector(env, algorithm.rollout_policy, generator=generator, max_staleness=max_staleness)

    def loggers(self, run_dir: Path) -> list[Logger]:
        """Create what writes the results of every evaluation."""
        return [SuiteResults(run_dir)]

    def write_results(self, run_dir: Path, trainer: Trainer) -> Path | None:
        """Write the file that reports of suites are made from."""
        return write_final_results(run_dir, trainer.iteration, trainer.total_steps, trainer.optimizer_steps)

    def card(self, source: Path) -> dict[str, Any]:
        """Policies of suites have no card yet."""
        raise ExportError(f"{source} was trained on the suite {self.id}; policies of suites cannot be exported yet.")

    def demo_path(self, run_dir: Path) -> Path | None:
        """Return where the demonstrations of a run are: given, recorded by the run itself, or nowhere."""
        if self.demos:
            return Path(self.demos)
        return run_dir / DEMOS if self.num_demos else None

    def record_demos(self, run_dir: Path, tell: Callable[[str], None]) -> None:
        """Record ``num_demos`` of each task, except those of tasks that the run recorded before it was stopped."""
        directory = run_dir / DEMOS
        horizon = {} if self.max_episode_length is None else {"horizon": self.max_episode_length}
        names = self.make_suite().task_names
        missing = [name for name in names if not (directory / f"{name}{SUFFIX}").is_file()]
        if not missing:
            return
        suite = replace(self, task_names_to_use=tuple(missing)).make_suite(**horizon)
        available = len(suite.init_states(0, "train"))
        if self.num_demos > available:
            raise ConfigError(
                f"task.num_demos must be at most {available}, the training states of a task of "
                f"'{self.benchmark_name}', got {self.num_demos}."
            )
        what = f"{plural(self.num_demos, 'demonstration')} of {', '.join(missing)}"
        tell(f"Recording {what} with scripted experts, in {directory}")

        def note(name: str, recorded: Recorded) -> None:
            failed = f", {recorded.num_failures} attempts failed" if recorded.num_failures else ""
            tell(f"  {name}: {plural(recorded.num_demos, 'demonstration')}, {recorded.num_steps} steps{failed}")

        wanted = num_cores() if self.num_workers is None else self.num_workers
        num_workers = 0 if len(missing) == 1 else min(wanted, len(missing))
        try:
            record_demos(suite, directory, self.num_demos, num_workers=num_workers, on_progress=note)
        except EnvError as error:
            raise EnvError(
                f"task.num_demos: {error} These are options of 'apexrl demos', whose directory task.demos takes; here "
                "the horizon is task.max_episode_length."
            ) from error

    def _read_demos(self, run_dir: Path, env: SuiteVecEnv, reader: str) -> TensorDict:
        path = self.demo_path(run_dir)
        if path is None:
            raise ConfigError(
                f"{reader} needs task.demos, a directory of demonstrations; 'apexrl demos "
                f"{self.benchmark_name} --per-task 10 --output DIR' records some, and so does the run with "
                "task.num_demos 10."
            )
        try:
            return load_demos(path, env.suite, self.chunk_size)
        except ConfigError as error:
            raise ConfigError(f"task.demos: {error}") from error


def imitation_config(config: Config, imitation: AlgorithmConfig, run_dir: Path) -> Config:
    """Return the configuration of the imitation that a run begins with."""
    num_updates, training, task = imitation.num_updates, config.training, config.task
    assert isinstance(task, SuiteConfig), "only algorithms that learn from suites imitate first"
    return replace(
        config,
        task=replace(task, demos=str(task.demo_path(run_dir)), num_demos=0),
        algo=imitation,
        training=replace(
            training,
            num_train_steps=0,
            eval_interval=0,
            save_interval=math.ceil(num_updates / 10),
            collector="sync",
            stop_when=None,
        ),
        logging=replace(config.logging, log_interval=math.ceil(num_updates / 100), log_freq=0, wandb="disabled"),
    )


def process_dir(run_dir: Path, number: int) -> Path:
    """Return where a process that learns with others keeps what it knows of the init states."""
    return run_dir if number == 0 else run_dir / f"process_{number}"


def begin_statistics(stats: RolloutStats, run_dir: Path, first_path: Path) -> None:
    """Let this process begin with what the run knows of the init states; a checkpoint may put other numbers there.

    A run that was killed before its first checkpoint begins with what was known when it was started. Outcomes belong
    to the policy, which all processes share: one without statistics of its own begins with those of the first
    (``first_path``), and those of processes that are no more are taken over by one that is.
    """
    own_dir = process_dir(run_dir, distributed.rank())
    if not distributed.is_main_process() and not len(stats) and first_path.exists():
        stats.load_state_dict(read_statistics(first_path))
    if checkpoint.numbered(run_dir / "checkpoints"):
        for path in _of_processes_that_are_no_more(run_dir):
            stats.load_state_dict({**read_statistics(path), **stats.state_dict()})
        return
    first = own_dir / FIRST_ROLLOUT_STATS
    if first.exists():
        stats.load_state_dict(read_statistics(first))
    else:
        write_json(first, stats.state_dict())
        stats.write()  # a place that cannot be written is better found before the first batch than after it


def _of_processes_that_are_no_more(run_dir: Path) -> list[Path]:
    """Return this process's share of the statistics that more processes left than there are now."""
    count, paths = distributed.world_size(), run_dir.glob(f"process_*/{ROLLOUT_STATS}")
    numbers = {path: path.parent.name.removeprefix("process_") for path in sorted(paths)}
    known = {path: int(number) for path, number in numbers.items() if number.isdecimal()}
    return [path for path, number in known.items() if number >= count and number % count == distributed.rank()]


class SuiteResults(Logger):
    """Keeps ``metrics.json``, an array with one entry for each evaluation over all tasks."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def log(self, values: Mapping[str, float]) -> None:
        """Write it again, from the evaluations that the run has recorded."""
        if "eval/return" in values:
            write_json(self.run_dir / METRICS_FILE, suite_evaluations(self.run_dir))


def suite_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run in the form of ``metrics.json``; a line without its place is left out.

    One entry per training step: the evaluation at the end takes the place of the periodic one of the same step.
    """
    entries = {
        record["iteration"]: {
            "step": record["iteration"],
            "environment_steps": record["step"],
            "overall_success_rate": record.get("success_rate"),
            "overall_success_interval": record.get("success_rate_interval"),
            "reward": record.get("return"),
            "per_task": record.get("per_task", {}),
        }
        for record in read_json_lines(run_dir / "evaluations.jsonl")
        if is_count(record.get("iteration")) and is_count(record.get("step"))
    }
    return list(entries.values())


def write_final_results(run_dir: Path, iteration: int, environment_steps: int, optimizer_steps: int | None) -> Path:
    """Write ``final_training_results.json``: how long training was, its numbers, and the evaluations.

    ``total_steps`` counts training steps (iterations) throughout the file, ``environment_steps`` control steps.
    """
    found = suite_evaluations(run_dir)
    write_json(run_dir / METRICS_FILE, found)
    content = {
        "total_steps": iteration,
        "environment_steps": environment_steps,
        "optimizer_steps": optimizer_steps,
        "training_metrics": [
            {**line, "total_steps": line.get("iteration"), "environment_steps": line.get("total_steps")}
            for line in read_json_lines(run_dir / "metrics.jsonl")
        ],
        "evaluations": found,
    }
    return write_json(run_dir / FINAL_RESULTS, content)
