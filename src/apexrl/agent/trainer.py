"""The schedule: collect, update, log, evaluate, save."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from apexrl import distributed, files
from apexrl.agent import checkpoint
from apexrl.agent.callbacks import Callbacks
from apexrl.agent.signals import Abandoned, StopRequest, stop_on_signal
from apexrl.algorithms.base import BaseAlgorithm
from apexrl.collectors.async_ import AsyncCollector
from apexrl.collectors.base import BaseCollector
from apexrl.collectors.sync import SyncCollector
from apexrl.envs import VecEnv, as_vec_env
from apexrl.errors import CheckpointError, ConfigError, DivergenceError, EnvError, EnvStateError, RunDirError
from apexrl.evaluation import EvaluationResult, evaluate, save_step_csvs
from apexrl.graphs import Acceleration, Stopwatch
from apexrl.loggers import ConsoleLogger, Logger, append_json_line
from apexrl.metrics import IDENTITY_FIELDS, Weighted, merged_to_host, training_log_names
from apexrl.models.encoder import leaves
from apexrl.policies.base import Policy
from apexrl.rollout import LOG
from apexrl.types import OBSERVATION, REWARD, VALID, VALUE, Observation

NO_GRAPHS = Acceleration(graphs=False)
EVAL_SEED_OFFSET = 1_000_003
"""Evaluation episodes are drawn from seeds that training does not use."""
SLOW_ITERATION, SNAPSHOT_SHARE, MAX_SNAPSHOT_BYTES = 0.5, 0.05, 2**30
"""An iteration of more seconds than this may have to be given up; what it begins with is then kept, if that takes no
more than this share of it, and no more memory than this."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Schedule of a run. Intervals count iterations; an iteration is one rollout and one update."""

    total_timesteps: int = 1_000_000
    """Environment steps, summed over environments, after which training ends."""
    num_train_steps: int = 0
    """Iterations after which training ends, whatever their steps; 0 leaves it to total_timesteps."""
    seed: int = 0
    """Of the environments; ``apexrl train`` also seeds the initial weights and the sampling with it."""
    device: str = "auto"
    """Of the policy and the tasks that ship: auto, cpu, cuda, cuda:1. Read by ``apexrl train``, not by Trainer."""
    num_threads: int = 1
    """CPU threads of PyTorch; 0 leaves its default, 1 suits small nets. Read by ``apexrl train``, not by Trainer."""
    init_from: str = ""
    """A run directory or checkpoint whose policy weights a new run starts from; a resumed run goes on with its own.
    Read by ``apexrl train``, not by Trainer."""
    collector: Literal["sync", "async", "ray"] = "sync"
    """sync: collect, then learn; async: collect in a thread while learning, for simulators in worker processes; ray:
    collect in Ray's workers, on this machine or a cluster. Read by ``apexrl train``, not by Trainer."""
    num_collectors: int = 2
    """Ray workers that share task.num_envs evenly; only for ray."""
    max_staleness: int = 1
    """How many updates old the weights may be that collected a rollout; only for async and ray."""
    step_timeout: float = 60.0
    """Seconds after which an environment step counts as hanging; only for async."""
    save_interval: int = 50
    """Iterations between checkpoints; 0 saves only at the end."""
    keep_checkpoints: int = 3
    """Numbered checkpoints that stay; older ones are deleted. 0 keeps all."""
    eval_interval: int = 0
    """Iterations between evaluations on separate environments; 0 evaluates only at the end."""
    eval_episodes: int = 20
    """Episodes of each periodic evaluation."""
    eval_num_envs: int = 10
    """Environments of an evaluation; never more than its episodes."""
    final_eval_episodes: int = 100
    """Episodes of the evaluation at the end; 0 skips it."""

    def __post_init__(self) -> None:
        for name in ("total_timesteps", "num_collectors", "eval_episodes", "eval_num_envs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"training.{name} must be at least 1, got {getattr(self, name)}.")
        for name in (
            "num_train_steps", "seed", "num_threads", "max_staleness", "save_interval", "keep_checkpoints",
            "eval_interval", "final_eval_episodes",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ConfigError(f"training.{name} must not be negative, got {getattr(self, name)}.")
        if self.step_timeout <= 0:
            raise ConfigError(f"training.step_timeout must be positive, got {self.step_timeout}.")
        for name, most in (("seed", 2**31), ("num_threads", 1024)):
            if getattr(self, name) > most:
                raise ConfigError(f"training.{name} must be at most {most}, got {getattr(self, name)}.")


def env_seed(seed: int, num_envs: int) -> int:
    """Return the seed of a process's environments: those of a run have seeds in a row, whoever steps them."""
    return seed + distributed.rank() * num_envs


class Trainer:
    """Drives any algorithm: collect, update, log, evaluate, save.

    Args:
        env: the training environments: a ``VecEnv``, or an object that ``as_vec_env`` can wrap.
        policy: the networks; the same object that the algorithm updates.
        algorithm: turns batches into updates.
        cfg: the schedule.
        collector: how batches are made; a ``SyncCollector`` when not given.
        eval_env: environments for evaluation; made from ``env`` when not given.
        loggers: where numbers go.
        run_dir: where ``evaluations.jsonl`` and step tables go; None writes neither.
        save_dir: where checkpoints go; None saves none.
        log_interval: iterations between logged ones.
        log_reward_components: log the metrics that the task declares besides success and failure.
        save_step_csv: write one table of steps for each environment at every evaluation.
        config: the whole configuration as plain values, stored in checkpoints.
    """

    def __init__(
        self,
        env: Any,
        policy: Policy,
        algorithm: BaseAlgorithm,
        cfg: TrainingConfig | None = None,
        *,
        collector: BaseCollector | None = None,
        eval_env: Any = None,
        loggers: Sequence[Logger] = (),
        run_dir: Path | str | None = None,
        save_dir: Path | str | None = None,
        log_interval: int = 1,
        log_reward_components: bool = True,
        save_step_csv: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if algorithm.policy is not policy:
            raise ConfigError("Trainer needs one policy: algorithm.policy is another object than policy.")
        captures = policy.device.type == "cuda" and getattr(algorithm, "acceleration", NO_GRAPHS).graphs
        if captures and (isinstance(collector, AsyncCollector) or distributed.world_size() > 1):
            raise ConfigError(
                "An algorithm must not capture CUDA graphs while AsyncCollector uses the device from another thread, "
                "nor where several processes learn; make it with acceleration=Acceleration(graphs=False)."
            )
        if distributed.world_size() > 1 and algorithm.shared_fields is None:
            raise ConfigError(
                f"{type(algorithm).__name__} learns in one process, not in {distributed.world_size()}; start it "
                "without torchrun."
            )
        if log_interval < 1:
            raise ConfigError(f"log_interval must be at least 1, got {log_interval}.")
        env = as_vec_env(env)
        self.env: VecEnv = env
        self.policy, self.algorithm = policy, algorithm
        self.cfg = cfg or TrainingConfig()
        distributed.equalize(policy.state_dict().values())
        self.collector = collector or SyncCollector(
            env, algorithm.rollout_policy, keep=algorithm.required_keys, seed=env_seed(self.cfg.seed, env.num_envs)
        )
        self.eval_env: VecEnv | None = None if eval_env is None else as_vec_env(eval_env)
        self.loggers = list(loggers) if distributed.is_first() else []
        self.run_dir = Path(run_dir) if run_dir is not None else None
        self.save_dir = Path(save_dir) if save_dir is not None else None
        self.log_interval = log_interval
        self.log_reward_components = log_reward_components
        self.save_step_csv = save_step_csv
        self.config = dict(config or {})
        self.callbacks = Callbacks()
        self.iteration = 0
        """Finished iterations."""
        self.total_steps = 0
        """Environment steps so far, summed over environments."""
        self.num_evaluations = 0
        self.run_lock: files.DirectoryLock | None = None
        """Of the run directory, where this trainer is the one that may write there; ``close`` gives it back."""
        self._saved_iteration: int | None = None
        self._snapshot: dict[str, Any] | None = None
        """A checkpoint of the beginning of this iteration, where it is likely to take long."""
        self._snapshot_seconds = 0.0
        self._iteration_seconds = {False: 0.0, True: math.inf}
        """Of the last iteration without and the last with an evaluation."""
        self._made_eval_envs: int | None = None
        """How many environments were asked for, when this trainer made them."""
        self._between_steps = True
        """False while a rollout or an update is under way, when there is no state worth saving."""
        self._acting = algorithm.rollout_policy
        self._told: set[str] = set()
        self._is_first = True
        """No update has begun since this trainer was made."""

    def add_callback(self, event: str, handler: Callable[..., Any]) -> None:
        """Call ``handler`` at an event; see ``apexrl.agent.callbacks``."""
        self.callbacks.add(event, handler)

    def learn(self, total_timesteps: int | None = None) -> None:
        """Train until ``total_steps`` reaches ``total_timesteps``, and save.

        Ctrl-C and SIGTERM end the running iteration, save, and then leave as usual; SIGTERM does not wait long for a
        slow iteration, and saves what it began with. Of several processes that learn
        together, all call this; when one is lost, the others leave, and the first saves what it knows.
        """
        target = self.cfg.total_timesteps if total_timesteps is None else total_timesteps
        with stop_on_signal() as stop:
            try:
                self._teach_normalizer(target, stop)
                while self._progress(target) < 1.0 and not stop.is_set_anywhere():
                    self._take_snapshot()
                    with stop.abandonable():
                        self._iterate(target)
                    if self.cfg.save_interval and self.iteration % self.cfg.save_interval == 0:
                        self._save_once()
                self._save_once()
            except Abandoned:
                self._between_steps = False
                self._save_before_leaving()
                what = f"Iteration {self.iteration + 1} takes too long to wait for; it is given up."
                self.tell(f"{what} {self._last_good()}")
            except DivergenceError as error:
                raise DivergenceError(f"{error} {self._last_good()}") from error
            except distributed.LostRankError as error:
                # It is noticed between two steps of an optimizer, when the weights are always fit to go on from.
                self._between_steps = True
                self._save_before_leaving()
                raise distributed.LostRankError(f"{error} {self._last_good()}") from error
            except RunDirError as error:
                raise RunDirError(f"{error} {self._last_good()}{self._how_to_go_on()}") from error
            except EnvError as error:
                self._save_before_leaving()
                raise EnvError(f"{error} {self._last_good()}{self._how_to_go_on()}") from error
            except Exception:
                self._save_before_leaving()
                raise
            stop.raise_if_set()

    def _progress(self, target: int) -> float:
        """How much of the training is done, from 0 to 1."""
        if self.cfg.num_train_steps:
            return min(1.0, self.iteration / self.cfg.num_train_steps)
        return min(1.0, self.total_steps / target)

    def _teach_normalizer(self, target: int, stop: StopRequest) -> None:
        """Show a new normaliser one rollout before learning from any.

        What networks learn from raw observations does not fit the normalised ones that would follow.
        """
        if self.total_steps >= target or not (self.algorithm.on_policy and self.policy.has_new_normalizer):
            return
        self._between_steps = False
        with stop.abandonable():
            batch = self.collector.collect(self.algorithm.num_steps)
        # What is not finite stays out; the first update will name it.
        obs = batch[OBSERVATION][batch[VALID].squeeze(-1)] if VALID in batch else batch[OBSERVATION]
        self.policy.update_normalizer(obs, apply=distributed.everywhere(_is_finite(obs)))
        self.total_steps += distributed.total(self.collector.steps_in(batch))
        self._between_steps = True

    def _iterate(self, target: int) -> None:
        fire, begin = self.callbacks.fire, time.monotonic()
        fire("pre_iteration", self)
        fire("pre_rollout", self)
        watch = Stopwatch(self.policy.device)
        watch.mark("rollout")
        self._between_steps = False
        if self.algorithm.rollout_policy is not self._acting:
            self._acting = self.algorithm.rollout_policy
            self.collector.follow(self._acting)
        batch = self.collector.collect(self.algorithm.num_steps)
        self._between_steps = True
        watch.mark("callbacks")
        if self.callbacks.wanted("post_rollout"):
            fire("post_rollout", self, _known(merged_to_host(self._rollout_metrics(batch))))
        if self._is_first:
            self._is_first = False
            if notice := self.algorithm.notice(batch):
                self.tell(notice)
        fire("pre_update", self)
        watch.mark("update")
        self._between_steps = False
        update_metrics = self.algorithm.update(batch)
        metrics = {**self._rollout_metrics(batch), **{f"train/{k}": v for k, v in update_metrics.items()}}
        watch.mark("end")
        host = merged_to_host(metrics)
        self.algorithm.raise_if_diverged({"nonfinite": host.pop("train/nonfinite", 0.0)}, batch)
        self.iteration += 1
        num_steps = distributed.total(self.collector.steps_in(batch))
        self.total_steps += num_steps
        self._between_steps = True
        self.algorithm.adjust_learning_rate(self._progress(target))
        stats = {"iteration": self.iteration, "total_steps": self.total_steps, **_known(host)}
        stats.update(_time_metrics(num_steps, watch.seconds()))
        fire("post_update", self, {k: v for k, v in stats.items() if k.startswith("train/")})
        self._record(stats, target)
        fire("post_iteration", self, stats)
        self._iteration_seconds[self._evaluates(self.iteration)] = time.monotonic() - begin

    def _evaluates(self, iteration: int) -> bool:
        return self.cfg.eval_interval > 0 and iteration % self.cfg.eval_interval == 0

    def _record(self, stats: dict[str, float], target: int) -> None:
        evaluated = self._evaluates(self.iteration)
        self._between_steps = False  # a checkpoint from here would lack what is recorded here
        if evaluated:
            stats.update(_known(self.evaluate(self.cfg.eval_episodes).logs()))
        if evaluated or self.iteration % self.log_interval == 0:
            stats.update(self.collector.metrics())
            for logger in self.loggers:
                logger.log(stats)
            self.collector.episode_metrics.clear()
        self._between_steps = True
        for logger in self.loggers:
            logger.progress(stats, self._progress(target))

    def _rollout_metrics(self, batch: TensorDict) -> dict[str, Tensor | Weighted]:
        metrics: dict[str, Tensor | Weighted] = {}
        if REWARD in batch:
            valid = batch[VALID] if VALID in batch else torch.ones_like(batch[REWARD])
            count = valid.sum()
            metrics["rollout/mean_reward"] = Weighted((batch[REWARD] * valid).sum() / count, lambda: count)
        if VALUE in batch:
            metrics["rollout/mean_value"] = batch[VALUE].mean()
        specs, episodes = self.env.metric_specs, self.collector.episode_metrics
        for name, mean in episodes.means().items():
            if name in IDENTITY_FIELDS or (name in specs and not self.log_reward_components):
                continue
            number = Weighted(mean, partial(episodes.count, name))
            metrics.update(dict.fromkeys(training_log_names(name, specs), number))
        if LOG in batch:
            for name, value in batch[LOG].items():
                metrics[f"env/{name.lstrip('/')}"] = Weighted(value.nanmean(), partial(_count_known, value))
        return metrics

    def evaluate(
        self,
        n_episodes: int = 10,
        deterministic: bool = True,
        on_progress: Callable[[int], None] | None = None,
    ) -> EvaluationResult:
        """Evaluate on separate environments; training goes on afterwards as if nothing had happened.

        Of several processes that learn together, all call this and get the result; the first one does the work.
        """
        # Making environments draws random numbers, and their simulators may: training must not notice.
        with self.collector.quiet(), checkpoint.kept_rng_state():
            result = distributed.on_first(
                lambda: evaluate(
                    self._evaluation_env(min(self.cfg.eval_num_envs, n_episodes)),
                    self.policy,
                    n_episodes,
                    deterministic=deterministic,
                    seed=self.cfg.seed + EVAL_SEED_OFFSET,
                    record_steps=self.save_step_csv,
                    on_progress=on_progress,
                )
            )
        if self.run_dir is not None and distributed.is_first():
            record = {"iteration": self.iteration, "step": self.total_steps, **result.record()}
            append_json_line(self.run_dir / "evaluations.jsonl", record)
            if result.step_rows is not None:
                directory = self.run_dir / "eval" / f"eval{self.num_evaluations}"
                with files.writing(directory):
                    save_step_csvs(result.step_rows, directory)
        self.num_evaluations += 1
        return result

    def _evaluation_env(self, num_envs: int) -> VecEnv:
        """Return the environments that were given, or ones made here in the wanted number."""
        if self.eval_env is not None and self._made_eval_envs not in (None, num_envs):
            self.eval_env.close()
            self.eval_env = None
        if self.eval_env is None:
            self.eval_env = self.env.spawn(num_envs)
            self._made_eval_envs = num_envs
        return self.eval_env

    def save_checkpoint(self, name: str | Path | None = None) -> Path:
        """Save everything needed to go on; a relative name lies in ``save_dir``.

        Of several processes that learn together, all call this; the first one writes the states of all into one file.
        """
        path = self._checkpoint_path(name or checkpoint.checkpoint_name(self.iteration))
        with self.collector.quiet():  # until it is written: a state may be memory that the environment works in
            content = self._content()
            own = {name: content[name] for name in checkpoint.OWN_KEYS}
            own["algorithm"] = {name: content["algorithm"][name] for name in self.algorithm.own_keys}
            peers = distributed.gather_on_first(own if not distributed.is_first() else {})[1:]
            if peers:
                content[checkpoint.PEERS] = peers
            distributed.on_first(lambda: checkpoint.save(path, content))
        if content["env"] is None and content["collector"]:
            self.tell(
                f"{type(self.env).__name__} cannot save its state: a resumed run will start new episodes there.",
                once=True,
            )
        return path

    def _content(self) -> dict[str, Any]:
        return {
            **self._learning_state(),
            "env": self.env.state_dict(),
            "rng": checkpoint.rng_state(),
            "iteration": self.iteration,
            "total_steps": self.total_steps,
            "num_evaluations": self.num_evaluations,
            "config": self.config,
        }

    def _learning_state(self) -> dict[str, Any]:
        return {
            "policy": self.policy.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "collector": self.collector.state_dict(),
        }

    def load_checkpoint(self, name: str | Path) -> None:
        """Go on from a checkpoint: weights, optimizer, counters, random states, environments.

        Raises:
            CheckpointError: when a part of it cannot be used; policy, algorithm and collector then stay as they were.
        """
        path = self._checkpoint_path(name)
        content = checkpoint.of_rank(checkpoint.load(path), distributed.rank(), distributed.world_size(), path)
        with self.collector.quiet():
            before = copy.deepcopy(self._learning_state())
            try:
                self._restore(content, path, before["collector"])
            except Exception:
                self.policy.load_state_dict(before["policy"])
                self.algorithm.load_state_dict(before["algorithm"])
                self.collector.load_state_dict(before["collector"])
                raise
            self.iteration, self.total_steps = content["iteration"], content["total_steps"]
            self.num_evaluations = content["num_evaluations"]
            if content["rng"] is None:
                distributed.seed_apart(self.cfg.seed + self.total_steps)
            else:
                checkpoint.set_rng_state(content["rng"])
        if path.parent == self.save_dir and path.name == checkpoint.checkpoint_name(self.iteration):
            self._saved_iteration = self.iteration

    def _restore(self, content: Mapping[str, Any], path: Path, old_collector: Mapping[str, Any]) -> None:
        """Restore the parts, the environments last: what they were before could not be brought back."""
        is_changed = content[checkpoint.CHANGED]
        if content["rng"] is not None:
            with checkpoint.restoring("rng", path), checkpoint.kept_rng_state():
                checkpoint.set_rng_state(content["rng"])
        checkpoint.load_module(self.policy, content["policy"], path)
        with checkpoint.restoring("algorithm", path):
            state = content["algorithm"]
            self.algorithm.load_state_dict(self.algorithm.without_own_state(state) if is_changed else state)
        if not is_changed:
            with checkpoint.restoring("collector", path):
                self.collector.load_state_dict(content["collector"])
        try:
            if is_changed:
                raise EnvStateError(is_changed)
            if content["env"] is None:
                raise EnvStateError("the checkpoint holds no environment state")
            with checkpoint.restoring("env", path):
                self.env.load_state_dict(content["env"])
        except EnvStateError as error:
            self.tell(f"New episodes start, so this run will differ from an uninterrupted one: {error}")
            self.collector.load_state_dict(old_collector)
            # Not the first episodes over again.
            self.collector.restart(env_seed(self.cfg.seed, self.env.num_envs) + content["total_steps"])

    def _save_once(self) -> None:
        """Save the numbered checkpoint of this iteration, unless that was done, and delete old ones."""
        if self.save_dir is None or self._saved_iteration == self.iteration:
            return
        self.save_checkpoint()
        self._note_saved(self.save_dir)

    def _note_saved(self, save_dir: Path) -> None:
        self._saved_iteration = self.iteration
        if self.cfg.keep_checkpoints and distributed.is_first():
            for path in checkpoint.numbered(save_dir, self.iteration)[: -self.cfg.keep_checkpoints]:
                path.unlink()

    def _take_snapshot(self) -> None:
        """Keep what the next iteration begins with, where it is likely to take long and the checkpoint is older."""
        self._snapshot = None
        expected = self._iteration_seconds[self._evaluates(self.iteration + 1)]
        too_dear = self._snapshot_seconds > SNAPSHOT_SHARE * expected
        if self.save_dir is None or self._saved_iteration == self.iteration or distributed.world_size() > 1:
            return
        if expected < SLOW_ITERATION or too_dear:
            return
        begin = time.monotonic()
        with self.collector.quiet():
            content = self._content()
            if checkpoint.num_bytes(content) > MAX_SNAPSHOT_BYTES:
                self._snapshot_seconds = math.inf
                return
            self._snapshot = checkpoint.copied(content)
        self._snapshot_seconds = time.monotonic() - begin

    def _save_snapshot(self) -> None:
        """Go back to the beginning of the iteration that was given up, and save it if that was kept."""
        if self._snapshot is None or self.save_dir is None:
            return
        content, self._snapshot = self._snapshot, None
        self.iteration, self.total_steps = content["iteration"], content["total_steps"]
        checkpoint.save(self.save_dir / checkpoint.checkpoint_name(self.iteration), content)
        self._note_saved(self.save_dir)

    def _save_before_leaving(self) -> None:
        """Save after an exception, if that still makes sense and works; it must not hide what went wrong."""
        try:
            if not self._between_steps:
                self._save_snapshot()
            elif distributed.world_size() == 1:
                self._save_once()
            elif distributed.is_first() and self.save_dir is not None and self._saved_iteration != self.iteration:
                self._save_alone(self.save_dir)
        except Exception as error:
            self.tell(f"No checkpoint could be saved at iteration {self.iteration}: {error} {self._last_good()}")

    def _save_alone(self, save_dir: Path) -> None:
        """Save without the states of the other processes, which may be gone; whoever resumes starts new episodes."""
        with self.collector.quiet():
            content = {**self._content(), "env": None, checkpoint.PEERS: [None] * (distributed.world_size() - 1)}
            checkpoint.save(save_dir / checkpoint.checkpoint_name(self.iteration), content)

    def _checkpoint_path(self, name: str | Path) -> Path:
        path = Path(name)
        if path.is_absolute():
            return path
        if self.save_dir is None:
            raise CheckpointError(
                f"Checkpoint '{name}' has no place: give the runner a save_dir, or an absolute path here."
            )
        return self.save_dir / path

    def _last_good(self) -> str:
        paths = checkpoint.numbered(self.save_dir, self.iteration) if self.save_dir is not None else []
        return f"The last good checkpoint is {paths[-1]}." if paths else "No checkpoint had been saved."

    def _how_to_go_on(self) -> str:
        """Say how to resume, where the command line can."""
        return f" Mend that, then go on with: apexrl train --resume {self.run_dir}" if self.config else ""

    def tell(self, text: str, once: bool = False) -> None:
        """Show a line to the user, on the console or else as a warning; with ``once`` only the first time."""
        if (once and text in self._told) or not distributed.is_first():
            return
        self._told.add(text)
        for logger in self.loggers:
            logger.message(text)
        if not any(isinstance(logger, ConsoleLogger) for logger in self.loggers):
            logging.getLogger("apexrl").warning(text)

    def close(self) -> None:
        """Close collector, loggers and environments."""
        self.collector.close()
        for logger in self.loggers:
            logger.close()
        for env in (self.env, self.eval_env):
            if env is not None:
                env.close()
        if self.run_lock is not None:
            self.run_lock.release()


def _is_finite(obs: Observation) -> Tensor:
    return torch.stack([leaf.isfinite().all() for leaf in leaves(obs).values()]).all()


def _count_known(values: Tensor) -> Tensor:
    return (~values.isnan()).sum()


def _known(values: Mapping[str, float]) -> dict[str, float]:
    """Leave out what is not known in this iteration, such as the return when no episode ended."""
    return {name: value for name, value in values.items() if not math.isnan(value)}


def _time_metrics(num_steps: int, seconds: Mapping[str, float]) -> dict[str, float]:
    total = seconds["rollout"] + seconds["update"]
    return {
        **({"time/fps": num_steps / total} if num_steps else {}),
        "time/rollout_share": seconds["rollout"] / total,
        "time/update_share": seconds["update"] / total,
    }
