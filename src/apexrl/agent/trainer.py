"""The schedule: collect, update, log, evaluate, save."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from apexrl.agent import checkpoint
from apexrl.agent.checkpointer import Checkpointer
from apexrl.agent.directories import RunDirectories
from apexrl.agent.loggers import Logger
from apexrl.agent.recipe import RECIPE, SPACES, write_recipe, write_spaces
from apexrl.agent.schedule import EVAL_SEED_OFFSET as EVAL_SEED_OFFSET
from apexrl.agent.schedule import Counters
from apexrl.agent.schedule import TrainingConfig as TrainingConfig
from apexrl.agent.schedule import env_seed as env_seed
from apexrl.agent.signals import GivenUp, StopRequest, stop_on_signal
from apexrl.agent.stop_when import Condition, StopWhen
from apexrl.agent.training_log import Stopwatch, TrainingLog
from apexrl.algorithms.base import BaseAlgorithm
from apexrl.collectors.base import BaseCollector, SyncCollector
from apexrl.collectors.episodes import SuiteRunner
from apexrl.collectors.groups import RolloutGenerator
from apexrl.core import plugins
from apexrl.core.errors import ApexRLError, ConfigError, EnvError, RunDirError, did_you_mean, sentences
from apexrl.core.observations import leaves
from apexrl.core.system import distributed
from apexrl.core.system.acceleration import Acceleration
from apexrl.core.system.files import DirectoryLock, append_json_line, writing
from apexrl.core.types import OBSERVATION, VALID
from apexrl.envs import VecEnv, as_vec_env
from apexrl.evaluation.evaluate import EvaluationResult, evaluate
from apexrl.evaluation.step_csv import save_step_csvs
from apexrl.policies.base import Policy

EVENTS = ("pre_iteration", "post_iteration", "pre_rollout", "post_rollout", "pre_update", "post_update")
NO_GRAPHS = Acceleration(graphs=False)
NO_EVALUATION = "The simulator holds one environment a process: there is no evaluation in this run."


def _default_collector(env: Any, algorithm: Any, seed: int) -> BaseCollector:
    policy = algorithm.rollout_policy
    if algorithm.learns_from == "groups" and env.suite is not None:
        return RolloutGenerator.from_config(SuiteRunner(env, policy), algorithm.cfg, seed=seed)
    return SyncCollector(env, policy, keep=algorithm.required_keys, seed=seed)


class Trainer:
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
        run_dir: where ``config.yaml``, ``metrics.jsonl``, ``evaluations.jsonl``, TensorBoard events and step tables go:
            a directory that every command reads. None writes nothing. Where one of the two directories already holds a
            run, ``run_2`` (or ``run_3``, …) in both is used, unless ``load_checkpoint`` continues that run; this is
            decided at the first write.
        save_dir: where checkpoints go; ``checkpoints`` in ``run_dir`` when not given, and none without either.
        log_interval: iterations between logged ones; the first and the last are always logged.
        log_reward_components: log the metrics that the task declares besides success and failure.
        save_step_csv: write one table of steps for each environment at every evaluation.
        tensorboard: write TensorBoard events into ``run_dir``.
        progress: show it on the console; when not given, in a terminal or a notebook.
        config: the whole configuration as plain values, stored in ``config.yaml`` and checkpoints; when not given,
            these say how the parts were created.
        lock: of ``run_dir``, held by this process: the directories are this run's own. ``close`` gives it back.
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
        tensorboard: bool = True,
        progress: bool | None = None,
        config: Mapping[str, Any] | None = None,
        lock: DirectoryLock | None = None,
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
        env = as_vec_env(env)
        eval_env = None if eval_env is None else as_vec_env(eval_env)
        for each in (env, eval_env or env):
            policy.check_fits(each)
        cfg = cfg or TrainingConfig()
        distributed.broadcast_parameters(algorithm.initial_tensors())
        distributed.seed_per_rank(cfg.seed)
        self.env: VecEnv = env
        self.eval_env: VecEnv | None = eval_env
        self.policy, self.algorithm, self.cfg = policy, algorithm, cfg
        self.collector = collector or _default_collector(env, algorithm, env_seed(cfg.seed))
        self.config = dict(config or {})
        self.counters = Counters()
        self.callbacks: dict[str, list[Callable[..., Any]]] = {event: [] for event in EVENTS}
        self.log = TrainingLog(loggers, self.collector, log_interval, log_reward_components, progress)
        logging = {"log_interval": log_interval, "reward_components": log_reward_components, "tensorboard": tensorboard}
        recipe = write_recipe(env, algorithm, cfg, logging, save_step_csv)
        self.directories = RunDirectories(
            run_dir, save_dir, self.tell, lock, config=config or recipe, device=policy.device
        )
        self.checkpointer = Checkpointer(
            env,
            policy,
            algorithm,
            self.collector,
            self.counters,
            cfg,
            self.directories,
            about={"config": self.config, RECIPE: recipe, SPACES: write_spaces(env)},
            tell=self.tell,
        )
        self.save_step_csv, self._tensorboard = save_step_csv, tensorboard
        self._check_step_csv()
        self._watch = Stopwatch(policy.device)
        """Runs while a rollout, an update or an evaluation is under way: the iteration begins again after a failure."""
        self._made_eval_envs: int | None = None
        """How many environments were asked for, when this trainer made them."""
        self._acting = algorithm.rollout_policy
        self._stop_request: StopRequest | None = None
        """Of the ``learn`` that runs."""
        self._is_first = True
        """No update has begun since this trainer was made."""
        if cfg.eval_interval and not self.can_evaluate:
            self.tell(NO_EVALUATION, once=True)
        self.stop_when = StopWhen(Condition.parse(cfg.stop_when), self) if cfg.stop_when else None
        if self.stop_when:
            self.log.add(self.stop_when)

    @property
    def iteration(self) -> int:
        """Finished iterations."""
        return self.counters.iteration

    @property
    def total_steps(self) -> int:
        """Environment steps so far, summed over environments."""
        return self.counters.total_steps

    @property
    def num_evaluations(self) -> int:
        """Evaluations so far."""
        return self.counters.num_evaluations

    @property
    def optimizer_steps(self) -> int | None:
        """Optimizer steps so far; None where the algorithm does not report them (``updates``)."""
        return self.counters.optimizer_steps

    @property
    def run_dir(self) -> Path | None:
        """Where ``evaluations.jsonl`` and step tables go."""
        return self.directories.run_dir

    @property
    def save_dir(self) -> Path | None:
        """Where checkpoints go."""
        return self.directories.save_dir

    def _check_step_csv(self) -> None:
        if self.save_step_csv and self.run_dir is None:
            raise ConfigError("save_step_csv needs a directory for the tables: give run_dir (log_dir of the runner).")

    def add_callback(self, event: str, handler: Callable[..., Any]) -> None:
        """Call ``handler`` at one of ``EVENTS``, after those that were added before.

        ``pre_*`` handlers get ``(runner)``, ``post_*`` handlers ``(runner, stats)``. One that returns ``False`` stops
        training as ``stop`` does. An exception in a handler stops the run with its own traceback.
        """
        if event not in EVENTS:
            raise ConfigError(f"Unknown event '{event}'; events are {list(EVENTS)}.{did_you_mean(event, EVENTS)}")
        self.callbacks[event].append(handler)

    def _fire(self, event: str, *stats: dict[str, float]) -> None:
        for handler in self.callbacks[event]:
            if handler(self, *stats) is False:
                self.stop()

    def tell(self, text: str, once: bool = False) -> None:
        """Show a line to the user, on the console or else as a warning; with ``once`` only the first time."""
        self.log.tell(text, once)

    def learn(self, total_timesteps: int | None = None) -> None:
        """Train until ``total_steps`` reaches ``total_timesteps``, and save; with 0 nothing happens.

        Ctrl-C and SIGTERM end the running iteration, save, and then leave as usual; SIGTERM does not wait long for a
        slow iteration. Of several processes that learn together, all call this.
        """
        target = self.cfg.total_timesteps if total_timesteps is None else total_timesteps
        if not target >= 0:
            raise ConfigError(f"total_timesteps must be a number that is not negative, got {target}.")
        if target == 0:
            return
        fire, watch = self._fire, self._watch
        with self._running(target) as stop:
            self._teach_normalizer(target)
            while self._progress(target) < 1.0 and not stop.requested():
                fire("pre_iteration")
                fire("pre_rollout")
                watch.mark("rollout")
                if self._acting is not self.algorithm.rollout_policy:
                    self._acting = self.algorithm.rollout_policy
                    self.collector.follow(self._acting)
                batch = self.collector.collect(self.algorithm.num_steps)
                watch.mark("callbacks")
                if self.callbacks["post_rollout"]:
                    fire("post_rollout", self.log.read(batch, {}))
                if self._is_first and (notice := self.algorithm.notice(batch)):
                    self.tell(notice)
                self._is_first = False
                fire("pre_update")
                watch.mark("update")
                learned = self.algorithm.update(batch)
                watch.mark("end")
                stats = self._count(batch, self.log.read(batch, learned))
                self.algorithm.adjust_learning_rate(self._progress(target))
                fire("post_update", {k: v for k, v in stats.items() if k.startswith("train/")})
                stats.update(evaluated := self._evaluate_if_due())
                self.log.write(stats, self._progress(target), always=bool(evaluated))
                fire("post_iteration", stats)
                self.checkpointer.save_if_due()
            if stop.asked:
                self.log.flush()
            self.checkpointer.save()
        if warning := self.no_step_warning():
            self.tell(warning)

    @contextmanager
    def _running(self, target: int) -> Iterator[StopRequest]:
        """Get ready to write, and take signals; when the block fails, save if that is possible, and say what is left.

        In the middle of a rollout or an update nothing is fit to be saved.
        """
        saver, writing_alone = self.checkpointer, self.directories.training(self.counters, target)
        with writing_alone, stop_on_signal(lambda: saver.seconds, lambda: not saver.is_saving) as stop:
            self.log.open(self.run_dir, self._tensorboard)
            self._stop_request = stop
            if self.stop_when and self.counters.stopped_by == str(self.stop_when.condition):
                resume = f": apexrl train --resume {self.run_dir}{plugins.flag()} --training.stop_when null"
                how = f"training.stop_when{resume if self.config else '.'}"
                self.tell(f"Training has ended: {self.counters.stopped_by}. To continue, change {how}")
                stop.asked = True
            try:
                yield stop
            except (GivenUp, Exception) as error:
                was_stopped = stop.signal_number is not None
                if isinstance(error, GivenUp) or (isinstance(error, distributed.LostRankError) and was_stopped):
                    what = f"Iteration {self.iteration + 1} takes too long to wait for; it is given up."
                    self.tell(f"{what} {saver.last_good()}")
                else:
                    self._save_and_explain(error)
                    raise
            finally:
                self._stop_request = None
                self._watch.clear()
                for logger in self.log.loggers:
                    logger.flush()
            stop.raise_if_set()

    def _save_and_explain(self, error: BaseException) -> None:
        """Save after an exception, where there is something fit for it; let the exception name the last checkpoint."""
        # A lost process is noticed between two steps of an optimizer, when the weights can always be resumed from.
        is_fit = not self._watch.marks or isinstance(error, distributed.LostRankError)
        if is_fit and not isinstance(error, RunDirError):
            self.checkpointer.save_before_leaving()
        text = self.checkpointer.last_good()
        if self.config and isinstance(error, EnvError | RunDirError):
            text += f" Fix the problem, then resume with: apexrl train --resume {self.run_dir}{plugins.flag()}"
        if isinstance(error, ApexRLError):
            error.args = (sentences(error, text),)
        else:
            error.add_note(text)

    def stop(self) -> None:
        """Let ``learn`` return after the running iteration, logged and saved; for callbacks and other threads."""
        if self._stop_request is not None:
            self._stop_request.asked = True

    @property
    def is_finished(self) -> bool:
        """Whether the configured number of steps or iterations is reached."""
        return self._progress(self.cfg.total_timesteps) >= 1.0

    def _progress(self, target: int) -> float:
        """How much of the training is done, from 0 to 1."""
        if self.cfg.num_train_steps:
            return min(1.0, self.counters.iteration / self.cfg.num_train_steps)
        return min(1.0, self.counters.total_steps / target)

    def _teach_normalizer(self, target: int) -> None:
        """Show a new normaliser one rollout before learning from any.

        What networks learn from raw observations does not fit the normalised ones that would follow.
        """
        if self.total_steps >= target or not (self.algorithm.on_policy and self.policy.has_new_normalizer):
            return
        self._watch.mark("rollout")
        batch = self.collector.collect_for_normalizer(self.algorithm.num_steps)
        # What is not finite stays out; the first update will name it.
        obs = batch[OBSERVATION][batch[VALID].squeeze(-1)] if VALID in batch else batch[OBSERVATION]
        is_finite = torch.stack([leaf.isfinite().all() for leaf in leaves(obs).values()]).all()
        self.policy.update_normalizer(obs, apply=distributed.all_ranks(is_finite))
        self.counters.total_steps += sum(distributed.all_gather_object(self.collector.steps_in(batch)))
        self._watch.clear()

    def _count(self, batch: TensorDict, numbers: dict[str, float]) -> dict[str, float]:
        """Count an iteration whose update was finite; returns its numbers with where the run is, and its speed."""
        losses = [value for name, value in numbers.items() if name.startswith("train/")]
        if numbers.pop("train/nonfinite", not all(map(math.isfinite, losses))) > 0:
            self.algorithm.raise_diverged(batch)
        counters, updates = self.counters, numbers.get("train/updates")
        num_steps = round(numbers.pop("rollout/num_steps") * distributed.world_size())  # a mean over the processes
        counters.iteration += 1
        counters.total_steps += num_steps
        if counters.optimizer_steps is not None:  # a count that was not known once is never known again
            counters.optimizer_steps = None if updates is None else counters.optimizer_steps + int(updates)
        seconds = self._watch.seconds()
        total = seconds["rollout"] + seconds["update"]
        return {
            "iteration": counters.iteration,
            "total_steps": counters.total_steps,
            **numbers,
            **({"time/fps": num_steps / total} if num_steps else {}),
            "time/rollout_share": seconds["rollout"] / total,
            "time/update_share": seconds["update"] / total,
        }

    def no_step_warning(self) -> str:
        """Return what to say at the end of a run whose optimizer took no step; an empty string for any other."""
        if self.optimizer_steps != 0 or not self.iteration:
            return ""
        advice = self.algorithm.advice_without_steps
        return (
            f"WARNING: nothing was learned. The optimizer took no step in {self.iteration:,} iterations, so the policy "
            f"is what it was at the start. {advice}".rstrip()
        )

    def save_checkpoint(self, name: str | Path | None = None) -> Path:
        """Save everything that is needed to continue; a relative name lies in ``save_dir``, and is never deleted.

        Of several processes that learn together, all call this; the first one writes the states of all into one file.
        """
        return self.checkpointer.save_as(name)

    def load_checkpoint(self, name: str | Path) -> None:
        """Continue from a checkpoint: weights, optimizer, counters, random states, environments.

        A relative name lies in ``save_dir``, or else in the working directory, as what ``save_checkpoint`` returned.
        Before the first write, a checkpoint in ``save_dir`` or ``run_dir`` says that the run in these directories is
        continued. One that writes to ``run_2`` also finds checkpoints of the run above it.

        Raises:
            CheckpointError: when a part of it cannot be used; policy, algorithm and collector then stay as they were.
        """
        self.checkpointer.load(name)

    @property
    def can_evaluate(self) -> bool:
        """Whether there are environments for evaluation, or can be."""
        return self.eval_env is not None or self.env.can_spawn

    def _evaluate_if_due(self) -> dict[str, float]:
        """Evaluate every ``eval_interval`` iterations; returns the numbers by log name, or nothing."""
        interval = self.cfg.eval_interval
        if not interval or self.counters.iteration % interval or not self.can_evaluate:
            return {}
        self._watch.mark("evaluation")
        logs = self.evaluate(self.cfg.eval_episodes).logs()
        self._watch.clear()
        return {name: value for name, value in logs.items() if not math.isnan(value)}

    def evaluate(
        self,
        n_episodes: int = 10,
        deterministic: bool = True,
        on_progress: Callable[[int], None] | None = None,
    ) -> EvaluationResult:
        """Evaluate on separate environments; training continues afterwards as if nothing had happened.

        Of several processes that learn together, all call this and get the result; the first one does the work.
        """
        if n_episodes < 1:
            raise ConfigError(f"The number of episodes to evaluate must be at least 1, got {n_episodes}.")
        self._check_step_csv()
        self.directories.prepare(self.iteration)

        def run() -> EvaluationResult:
            env = self._evaluation_env(min(self.cfg.eval_num_envs, n_episodes))
            once = partial(evaluate, env, self.policy, n_episodes, seed=self.cfg.seed + EVAL_SEED_OFFSET, events=events)
            result = once(deterministic=deterministic, record_steps=self.save_step_csv, on_progress=on_progress)
            if not (deterministic and self.cfg.eval_sampled):
                return result
            return replace(result, sampled=once(deterministic=False))

        # Making environments draws random numbers, and their simulators may: training must not notice.
        with self.collector.quiet(), checkpoint.kept_rng_state():
            events = set().union(*distributed.all_gather_object(self.collector.episode_metrics.events()))
            result = distributed.on_main_process(run)
        if self.run_dir is not None and distributed.is_main_process():
            record = {"iteration": self.iteration, "step": self.total_steps, **result.record()}
            append_json_line(self.run_dir / "evaluations.jsonl", record)
            if result.step_rows is not None:
                directory = self.run_dir / "eval" / f"eval{self.num_evaluations}"
                with writing(directory):
                    save_step_csvs(result.step_rows, directory)
        self.counters.num_evaluations += 1
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

    def close(self) -> None:
        """Close collector, loggers and environments, and give the run directory back."""
        self.collector.close()
        self.log.close()
        for env in (self.env, self.eval_env):
            if env is not None:
                env.close()
        self.directories.release()
