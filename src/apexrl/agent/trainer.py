"""The schedule: collect, update, log, evaluate, save."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from apexrl.agent import checkpoint
from apexrl.agent.callbacks import Callbacks
from apexrl.agent.loggers import Logger
from apexrl.agent.schedule import EVAL_SEED_OFFSET as EVAL_SEED_OFFSET
from apexrl.agent.schedule import TrainingConfig as TrainingConfig
from apexrl.agent.schedule import env_seed as env_seed
from apexrl.agent.signals import Abandoned, StopRequest, stop_on_signal
from apexrl.agent.state import ResumableTraining
from apexrl.algorithms.base import BaseAlgorithm
from apexrl.collectors.base import BaseCollector
from apexrl.collectors.episodes import SuiteRunner
from apexrl.collectors.groups import RolloutGenerator
from apexrl.collectors.sync import SyncCollector
from apexrl.core.errors import ConfigError, DivergenceError, EnvError, RunDirError
from apexrl.core.metrics import Weighted, merged_collection, merged_to_host, training_log_names
from apexrl.core.observations import leaves
from apexrl.core.system import distributed, files
from apexrl.core.system.acceleration import Acceleration, Stopwatch
from apexrl.core.system.json_lines import append_json_line
from apexrl.core.types import OBSERVATION, REWARD, VALID, VALUE, Observation
from apexrl.envs import VecEnv, as_vec_env
from apexrl.evaluation.evaluate import EvaluationResult, evaluate
from apexrl.evaluation.step_csv import save_step_csvs
from apexrl.policies.base import Policy
from apexrl.rollout import LOG

NO_GRAPHS = Acceleration(graphs=False)


def _default_collector(env: Any, algorithm: Any, seed: int) -> BaseCollector:
    policy = algorithm.rollout_policy
    if algorithm.learns_from == "groups" and env.suite is not None:
        return RolloutGenerator.from_config(SuiteRunner(env, policy), algorithm.cfg, seed=seed)
    return SyncCollector(env, policy, keep=algorithm.required_keys, seed=seed)


class Trainer(ResumableTraining):
    """Drives any algorithm: collect, update, log, evaluate, save.

    Args:
        env: the training environments: a ``VecEnv``, or an object that ``as_vec_env`` can wrap.
        policy: the networks; the same object that the algorithm updates.
        algorithm: turns batches into updates.
        cfg: the schedule.
        collector: how batches are made; when not given a ``SyncCollector``, or for RLOO on a suite a
            ``RolloutGenerator`` with the algorithm's options.
        eval_env: environments for evaluation; made from ``env`` when not given.
        loggers: where numbers go.
        run_dir: where ``evaluations.jsonl`` and step tables go; None writes neither.
        save_dir: where checkpoints go; None saves none.
        log_interval: iterations between logged ones; the first and the last are always logged.
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
        if not isinstance(collector, BaseCollector | None):
            raise ConfigError(
                f"Trainer needs a BaseCollector, got {type(collector).__name__}; make it a subclass of BaseCollector, "
                "which needs no method but collect."
            )
        captures = policy.device.type == "cuda" and getattr(algorithm, "acceleration", NO_GRAPHS).graphs
        if captures and ((collector is not None and collector.in_background) or distributed.world_size() > 1):
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
        eval_env = None if eval_env is None else as_vec_env(eval_env)
        for each in (env, eval_env or env):
            policy.check_fits(each)
        cfg = cfg or TrainingConfig()
        distributed.broadcast_parameters(algorithm.initial_tensors())
        distributed.seed_per_rank(cfg.seed)
        collector = collector or _default_collector(env, algorithm, env_seed(cfg.seed))
        super().__init__(
            env, policy, algorithm, cfg, collector=collector, loggers=loggers, save_dir=save_dir, config=config
        )
        self.eval_env: VecEnv | None = eval_env
        self.run_dir = Path(run_dir) if run_dir is not None else None
        self.log_interval = log_interval
        self.log_reward_components = log_reward_components
        self.save_step_csv = save_step_csv
        self._check_step_csv()
        self.callbacks = Callbacks()
        self.run_lock: files.DirectoryLock | None = None
        """Of the run directory, where this trainer is the one that may write there; ``close`` gives it back."""
        self._made_eval_envs: int | None = None
        """How many environments were asked for, when this trainer made them."""
        self._acting = algorithm.rollout_policy
        self._stop_request: StopRequest | None = None
        """Of the ``learn`` that runs."""
        self._unlogged: dict[str, float] | None = None
        """The numbers of the last iteration, where no logger has them."""
        self._is_first = True
        """No update has begun since this trainer was made."""

    def _check_step_csv(self) -> None:
        if self.save_step_csv and self.run_dir is None:
            raise ConfigError("save_step_csv needs a directory for the tables: give run_dir (log_dir of the runner).")

    def add_callback(self, event: str, handler: Callable[..., Any]) -> None:
        """Call ``handler`` at an event; see ``apexrl.agent.callbacks``."""
        self.callbacks.add(event, handler)

    def learn(self, total_timesteps: int | None = None) -> None:
        """Train until ``total_steps`` reaches ``total_timesteps``, and save.

        Nothing happens with 0. Ctrl-C and SIGTERM end the running iteration, save, and then leave as usual; SIGTERM
        does not wait long for a slow iteration, and saves what it began with. Of several processes that learn
        together, all call this; when one is lost, the others leave, and the first saves what it knows.
        """
        target = self.cfg.total_timesteps if total_timesteps is None else total_timesteps
        if target < 0:
            raise ConfigError(f"total_timesteps must not be negative, got {target}.")
        if target == 0:
            return
        self._prepare_directories()
        with stop_on_signal(self._save_in_time) as stop:
            self._stop_request = stop
            try:
                self._teach_normalizer(target, stop)
                while self._progress(target) < 1.0 and not stop.is_set_anywhere():
                    self._take_snapshot()
                    with stop.abandonable():
                        self._iterate(target)
                    if self.cfg.save_interval and self.iteration % self.cfg.save_interval == 0:
                        self._save_once()
                if stop.asked and self._unlogged is not None:
                    self._log(self._unlogged)
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
            finally:
                self._stop_request = None
            stop.raise_if_set()
        if warning := self.no_step_warning():
            self.tell(warning)

    def no_step_warning(self) -> str:
        """Return what to say at the end of a run whose optimizer took no step; an empty string for any other."""
        if self.optimizer_steps != 0 or not self.iteration:
            return ""
        advice = self.algorithm.advice_without_steps
        return (
            f"WARNING: nothing was learned. The optimizer took no step in {self.iteration:,} iterations, so the policy "
            f"is what it was at the start. {advice}".rstrip()
        )

    def stop(self) -> None:
        """Let ``learn`` return after the running iteration, logged and saved; for callbacks and other threads."""
        if self._stop_request is not None:
            self._stop_request.asked = True

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
            batch = self.collector.collect_for_normalizer(self.algorithm.num_steps)
        # What is not finite stays out; the first update will name it.
        obs = batch[OBSERVATION][batch[VALID].squeeze(-1)] if VALID in batch else batch[OBSERVATION]
        self.policy.update_normalizer(obs, apply=distributed.all_ranks(_all_finite(obs)))
        self.total_steps += distributed.all_reduce_sum(self.collector.steps_in(batch))
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
            fire("post_rollout", self, _without_unknown(merged_to_host(self._rollout_metrics(batch))))
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
        self._count_optimizer_steps(host.get("train/updates"))
        num_steps = distributed.all_reduce_sum(self.collector.steps_in(batch))
        self.total_steps += num_steps
        self._between_steps = True
        self.algorithm.adjust_learning_rate(self._progress(target))
        stats = {"iteration": self.iteration, "total_steps": self.total_steps, **_without_unknown(host)}
        stats.update(_time_metrics(num_steps, watch.seconds()))
        fire("post_update", self, {k: v for k, v in stats.items() if k.startswith("train/")})
        self._record(stats, target)
        fire("post_iteration", self, stats)
        self._iteration_seconds[self._evaluates(self.iteration)] = time.monotonic() - begin

    def _count_optimizer_steps(self, taken: float | None) -> None:
        """Add what an update reported; a count that was not known once is never known again."""
        if self.optimizer_steps is not None:
            self.optimizer_steps = None if taken is None else self.optimizer_steps + int(taken)

    def _record(self, stats: dict[str, float], target: int) -> None:
        evaluated = self._evaluates(self.iteration)
        self._between_steps = False  # a checkpoint from here would lack what is recorded here
        if evaluated:
            stats.update(_without_unknown(self.evaluate(self.cfg.eval_episodes).logs()))
        self._unlogged = stats
        is_first_or_last = self.iteration == 1 or self._progress(target) >= 1.0
        if evaluated or is_first_or_last or self.iteration % self.log_interval == 0:
            self._log(stats)
        self._between_steps = True
        for logger in self.loggers:
            logger.progress(stats, self._progress(target))

    def _log(self, stats: dict[str, float]) -> None:
        stats.update(merged_collection(self.collector.metrics()))
        for logger in self.loggers:
            logger.log(stats)
        self.collector.episode_metrics.clear()
        self._unlogged = None

    def _rollout_metrics(self, batch: TensorDict) -> dict[str, Tensor | Weighted]:
        metrics: dict[str, Tensor | Weighted] = {}
        if REWARD in batch:
            valid = batch[VALID] if VALID in batch else torch.ones_like(batch[REWARD])
            count = valid.sum()
            metrics["rollout/mean_reward"] = Weighted((batch[REWARD] * valid).sum() / count, lambda: count)
        if VALUE in batch:
            metrics["rollout/mean_value"] = batch[VALUE].mean()
        episodes = self.collector.episode_metrics
        specs, events = episodes.specs, {field for name in episodes.reported for field in episodes.specs[name].fields}
        for name, mean in episodes.means().items():
            if name in specs and not self.log_reward_components:
                continue
            number = Weighted(mean, partial(episodes.count, name), name in events)
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
        if n_episodes < 1:
            raise ConfigError(f"The number of episodes to evaluate must be at least 1, got {n_episodes}.")
        self._check_step_csv()
        self._prepare_directories()
        # Making environments draws random numbers, and their simulators may: training must not notice.
        with self.collector.quiet(), checkpoint.kept_rng_state():
            events = set().union(*distributed.all_gather_object(self.collector.episode_metrics.events()))
            result = distributed.on_main_process(
                lambda: self._run_evaluation(n_episodes, deterministic, events, on_progress)
            )
        if self.run_dir is not None and distributed.is_main_process():
            record = {"iteration": self.iteration, "step": self.total_steps, **result.record()}
            append_json_line(self.run_dir / "evaluations.jsonl", record)
            if result.step_rows is not None:
                directory = self.run_dir / "eval" / f"eval{self.num_evaluations}"
                with files.writing(directory):
                    save_step_csvs(result.step_rows, directory)
        self.num_evaluations += 1
        return result

    def _run_evaluation(
        self, n_episodes: int, deterministic: bool, events: set[str], on_progress: Callable[[int], None] | None
    ) -> EvaluationResult:
        env = self._evaluation_env(min(self.cfg.eval_num_envs, n_episodes))
        seed = self.cfg.seed + EVAL_SEED_OFFSET
        run = partial(evaluate, env, self.policy, n_episodes, seed=seed, events=events)
        result = run(deterministic=deterministic, record_steps=self.save_step_csv, on_progress=on_progress)
        if not (deterministic and self.cfg.eval_sampled):
            return result
        return replace(result, sampled=run(deterministic=False))

    def _evaluation_env(self, num_envs: int) -> VecEnv:
        """Return the environments that were given, or ones made here in the wanted number."""
        if self.eval_env is not None and self._made_eval_envs not in (None, num_envs):
            self.eval_env.close()
            self.eval_env = None
        if self.eval_env is None:
            self.eval_env = self.env.spawn(num_envs)
            self._made_eval_envs = num_envs
        return self.eval_env

    def _how_to_go_on(self) -> str:
        """Say how to resume, where the command line can."""
        return f" Mend that, then go on with: apexrl train --resume {self.run_dir}" if self.config else ""

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


def _all_finite(obs: Observation) -> Tensor:
    return torch.stack([leaf.isfinite().all() for leaf in leaves(obs).values()]).all()


def _count_known(values: Tensor) -> Tensor:
    return (~values.isnan()).sum()


def _without_unknown(values: Mapping[str, float]) -> dict[str, float]:
    """Leave out what is not known in this iteration, such as the return when no episode ended."""
    return {name: value for name, value in values.items() if not math.isnan(value)}


def _time_metrics(num_steps: int, seconds: Mapping[str, float]) -> dict[str, float]:
    total = seconds["rollout"] + seconds["update"]
    return {
        **({"time/fps": num_steps / total} if num_steps else {}),
        "time/rollout_share": seconds["rollout"] / total,
        "time/update_share": seconds["update"] / total,
    }
