"""Tasks by name, one kind of what a run trains on; the other is a suite of tasks.

Both kinds answer the same questions: the methods of ``TaskConfig`` are those of ``SuiteConfig``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args

import torch
from pydantic import Field

from apexrl.agent import Trainer
from apexrl.agent.loggers import Logger
from apexrl.agent.schedule import env_seed
from apexrl.algorithms import BaseAlgorithm
from apexrl.collectors import AsyncCollector, BaseCollector, RayCollector, SyncCollector
from apexrl.core.errors import ApexRLError, ConfigError, EnvError, did_you_mean
from apexrl.core.metrics import MetricSpec, Reduce
from apexrl.core.plugins import require_trust
from apexrl.core.system import distributed
from apexrl.core.system.acceleration import Acceleration
from apexrl.core.validation import Integer, NonNegativeInteger, options
from apexrl.envs import VecEnv, make_env
from apexrl.envs.suites import TaskSuite
from apexrl.envs.suites.env import SuiteVecEnv

if TYPE_CHECKING:
    from apexrl.run.config import Config

MAX_NUM_ENVS = 2**24
"""Beyond what any machine holds: a typing mistake, better refused than tried."""


@options("task")
class TaskConfig:
    """What is trained on."""

    # What algorithms can learn from here -> values of training.collector that collect it.
    collectors: ClassVar[Mapping[str, tuple[str, ...]]] = {"steps": ("sync", "async", "ray")}
    # Whether a run records demonstrations itself, where something reads them.
    records_demos: ClassVar[bool] = False

    id: str = "lift"
    """A task that ships with the package or of another simulator (see ``apexrl list``), or a Gymnasium id."""
    num_envs: Annotated[Integer, Field(ge=1, le=MAX_NUM_ENVS)] = 64
    """Environments stepped together. More give steadier updates and more steps per second, but fewer updates for the
    same steps; usually 1 to 64 on a CPU, 1,024 to 8,192 on a GPU."""
    num_workers: NonNegativeInteger = 0
    """Processes that step Gymnasium environments; 0 steps them here, faster unless a step takes a millisecond."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the task itself."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Numbers of a Gymnasium environment's info to log, by name: how the steps of an episode become one number (sum,
    mean, max, min or last), or a mapping with reduce, group and event (true: an episode without it counts 0)."""

    @property
    def metric_specs(self) -> list[MetricSpec]:
        """What ``metrics`` declares."""
        return [_metric_spec(name, how) for name, how in self.metrics.items()]

    @property
    def options(self) -> dict[str, Any]:
        """What a manifest pins, besides the name."""
        return dict(self.kwargs)

    def __post_init__(self) -> None:
        _ = self.metric_specs  # refuses what cannot be declared
        if self.num_workers > self.num_envs:
            raise ConfigError(
                f"task.num_workers must lie between 0 and task.num_envs ({self.num_envs}), got {self.num_workers}."
            )
        for name, value in self.kwargs.items():
            if not _is_plain(value):
                raise ConfigError(
                    f"task.kwargs.{name} must be a string, a number, a list or a mapping of these, got {value!r}; "
                    "quote it to make it a string."
                )

    def check(self, config: Config) -> None:
        """Raise when other sections do not fit."""
        training = config.training
        if training.collector == "ray" and self.num_envs % training.num_collectors:
            raise ConfigError(
                f"task.num_envs must be a multiple of training.num_collectors ({training.num_collectors}) with "
                f"training.collector ray, got {self.num_envs}."
            )

    def with_options(self, options: Mapping[str, Any]) -> TaskConfig:
        """Return the task with the options of a manifest."""
        return replace(self, kwargs=dict(options))

    def share(self) -> TaskConfig:
        """Return the task of one of the processes that learn together, with a share of its environments."""
        num_workers = -(-self.num_workers // distributed.world_size())
        return replace(self, num_envs=distributed.share(self.num_envs, "task.num_envs"), num_workers=num_workers)

    def make_env(self, device: torch.device | str, num_envs: int | None = None) -> VecEnv:
        """Create environments: those of training, or ``num_envs`` others for evaluation."""
        count = num_envs or self.num_envs
        workers = min(self.num_workers, count)
        if ":" in self.id:
            require_trust(self.id, "task.id")
        try:
            return make_env(
                self.id, count, device=device, num_workers=workers, metrics=self.metric_specs, **self.kwargs
            )
        except EnvError as error:
            raise EnvError(f"task.id {self.id}: {error}") from error
        except (TypeError, ValueError) as error:
            if isinstance(error, ApexRLError) or not self.kwargs:
                raise
            raise ConfigError(f"task.kwargs {self.kwargs} cannot be given to '{self.id}': {error}.") from error

    def make_collector(
        self, config: Config, env: VecEnv, algorithm: BaseAlgorithm, acceleration: Acceleration, run_dir: Path
    ) -> BaseCollector:
        """Create what the algorithm learns from, in environments of ``make_env``."""
        acting, keep, training = algorithm.rollout_policy, algorithm.required_keys, config.training
        seed = env_seed(training.seed)
        if training.collector == "sync":
            return SyncCollector(env, acting, keep=keep, seed=seed, acceleration=acceleration)
        if training.collector == "async":
            return AsyncCollector(
                env,
                acting,
                keep=keep,
                seed=seed,
                max_staleness=training.max_staleness,
                step_timeout=training.step_timeout,
                acceleration=acceleration,
            )
        if distributed.world_size() > 1:
            raise ConfigError("training.collector ray needs one learning process; start it without torchrun.")
        return RayCollector(
            partial(self.make_env, torch.device("cpu"), self.num_envs // training.num_collectors),
            acting,
            keep=keep,
            seed=seed,
            num_workers=training.num_collectors,
            max_staleness=training.max_staleness,
        )

    def loggers(self, run_dir: Path) -> list[Logger]:
        """Create the loggers that only runs of this kind have."""
        return []

    def record_demos(self, run_dir: Path, tell: Callable[[str], None]) -> None:
        """Record the demonstrations that the run is to have."""
        return

    def write_results(self, run_dir: Path, trainer: Trainer) -> Path | None:
        """Write the results of a finished run, where this kind has a file for them; returns that."""
        return None

    def make_env_on(self, suite: TaskSuite, device: torch.device, num_workers: int) -> SuiteVecEnv | None:
        """Create environments of a suite with the options of this one; None where this is none."""
        return None

    def card(self, source: Path) -> dict[str, Any]:
        """Return what the card of a policy that is exported from ``source`` says of its task."""
        return {"id": self.id, "kwargs": self.kwargs}


def _metric_spec(name: str, how: Any) -> MetricSpec:
    """Return the metric that ``task.metrics`` declares under a name."""
    values = how if isinstance(how, dict) else {"reduce": how}
    kinds = {"reduce": str, "group": str, "event": bool}
    for key, value in values.items():
        if key not in kinds:
            raise ConfigError(
                f"task.metrics.{name} takes {', '.join(kinds)}, got '{key}'.{did_you_mean(str(key), kinds)}"
            )
        if not isinstance(value, kinds[key]):
            wanted = {"reduce": f"one of {get_args(Reduce)}", "group": "a string", "event": "true or false"}[key]
            raise ConfigError(f"task.metrics.{name}.{key} must be {wanted}, got {value!r}.")
    try:
        return MetricSpec(name, **values)
    except ConfigError as error:
        raise ConfigError(f"task.metrics.{name}: {error}") from error


def _is_plain(value: Any) -> bool:
    """Say whether YAML and checkpoints give a value back as it is."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
