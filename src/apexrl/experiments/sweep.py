"""A hyperparameter sweep with Optuna: trials are runs in processes of their own, and a kill loses nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import yaml
from optuna.distributions import CategoricalChoiceType
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from apexrl.core.errors import ConfigError, RunDirError, did_you_mean
from apexrl.core.functional.intervals import iqm
from apexrl.core.system import files
from apexrl.core.system.files import read_json_lines
from apexrl.experiments.jobs import Job, Report
from apexrl.experiments.plots import plot_sweep
from apexrl.experiments.sweep_file import Dimension, SweepFile, as_text, read_sweep, sweep_from
from apexrl.run.sources import parse_yaml

JOURNAL, SWEEP, BEST, RESULTS, IMAGE = "journal.jsonl", "sweep.yaml", "best.yaml", "sweep.json", "sweep.png"
ERROR, SCORES = "error", "scores"
"""What is kept of a trial besides what Optuna does: why it failed, and the value of each seed."""
MIN_FOR_IMPORTANCE = 8
"""Finished trials before it is said which field mattered."""
_PRUNERS: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
    "none": optuna.pruners.NopPruner,
    "median": partial(optuna.pruners.MedianPruner, n_startup_trials=4, n_warmup_steps=0),
    "halving": optuna.pruners.SuccessiveHalvingPruner,
}


class Sweep:
    """The trials of a sweep, in its directory.

    The caller holds the lock of the directory; ``tell`` shows a line.
    """

    def __init__(self, file: SweepFile, directory: Path, tell: Callable[[str], None]) -> None:
        self.file, self.directory, self.tell = file, directory, tell
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        files.replace_text(directory / SWEEP, yaml.safe_dump(file.to_dict(), sort_keys=False))
        _repair_journal(directory / JOURNAL)
        self.study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(directory / JOURNAL))),
            study_name="sweep",
            direction=file.direction,
            pruner=_PRUNERS[file.pruning](),
            load_if_exists=True,
        )
        # Those that were running when the sweep was killed resume from their checkpoints.
        self._interrupted = [Trial(self.study, trial._trial_id) for trial in self._trials(TrialState.RUNNING)]
        self._jobs: dict[Path, Trial] = {}
        self._waiting: list[tuple[Trial, int]] = []
        self._pruned: set[int] = set()

    def next_job(self) -> Job | None:
        """Return the next seed of a trial, whose seeds run one after another; None when nothing can start now."""
        while True:
            if self._waiting:
                trial, seed = self._waiting.pop(0)
                return self._job(trial, seed)
            if self._interrupted:
                trial = self._interrupted.pop(0)
            elif len(self._trials()) < self.file.trials:
                trial = self.study.ask()
            else:
                return None
            try:
                config = self.file.config(self._suggest(trial))
            except ConfigError as error:  # each value is possible, but not all of them together
                self._fail(trial, str(error))
                self.tell(f"trial {trial.number} failed: {error}")
                continue
            self._waiting.append((trial, config.training.seed + len(trial.user_attrs.get(SCORES, []))))

    def on_report(self, report: Report) -> bool:
        """Note what a trial did; returns whether it continues."""
        trial, values = self._jobs[report.job.run_dir], report.values
        if report.kind == "evaluation":
            return not self._is_pruned(trial, values)
        if report.kind == "failed":
            self._fail(trial, values["error"])
        elif report.kind == "stopped" and trial.number in self._pruned:
            self.study.tell(trial, state=TrialState.PRUNED)
            self.write()
            self.tell(f"trial {trial.number} was pruned")
        elif report.kind == "done":
            self._finish_seed(trial, report.job.config["training"]["seed"], values)
        return True

    def label(self, report: Report) -> str:
        """Return what a job is called."""
        trial = self._jobs[report.job.run_dir]
        return f"trial {trial.number}" + (f", {report.job.run_dir.name}" if self.file.seeds > 1 else "")

    def write(self) -> dict[str, Any]:
        """Write results and the best configuration; returns the results."""
        results = self._results()
        files.write_json(self.directory / RESULTS, results)
        if (best := results["best"]) is not None:
            text = yaml.safe_dump(self.file.config(best["params"]).to_dict(), sort_keys=False)
            head = f"# Trial {best['number']} of a sweep: {self.file.objective} {best['value']:.6g}.\n"
            files.replace_text(self.directory / BEST, head + text)
        return results

    def draw(self, results: Mapping[str, Any]) -> Path:
        """Draw the results."""
        return plot_sweep(results["trials"], self.file.objective, results["importance"], self.directory / IMAGE)

    def _job(self, trial: Trial, seed: int) -> Job:
        values = {**self._values(trial.params), "training.seed": seed}
        run_dir = self.directory / f"trial-{trial.number:04d}"
        job = Job(self.file.config(values).to_dict(), run_dir / f"seed-{seed}" if self.file.seeds > 1 else run_dir)
        self._jobs[job.run_dir] = trial
        return job

    def _suggest(self, trial: Trial) -> dict[str, Any]:
        """Draw the fields of a trial; what it has already stays. Seed, number and earlier trials decide."""
        state = np.random.SeedSequence([self.file.seed, trial.number]).generate_state(1)
        random, tpe, seed = optuna.samplers.RandomSampler, optuna.samplers.TPESampler, int(state[0])
        self.study.sampler = random(seed) if self.file.sampler == "random" else tpe(seed=seed)
        for dimension in self.file.space:
            if dimension.choices:
                trial.suggest_categorical(dimension.name, list(_labels(dimension)))
            elif dimension.is_integer:
                trial.suggest_int(dimension.name, int(dimension.low), int(dimension.high), log=dimension.log)
            else:
                trial.suggest_float(dimension.name, dimension.low, dimension.high, log=dimension.log)
        return self._values(trial.params)

    def _values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that Optuna's parameters stand for."""
        labels = {dimension.name: _labels(dimension) for dimension in self.file.space if dimension.choices}
        return {name: labels[name][value] if name in labels else value for name, value in params.items()}

    def _is_pruned(self, trial: Trial, logged: Mapping[str, float]) -> bool:
        """Report an evaluation of a trial's first seed, and ask the pruner."""
        value = _objective(self.file.objective, logged)
        if self.file.pruning == "none" or value is None or trial.user_attrs.get(SCORES):
            return False
        step = int(logged["iteration"])
        if step not in self.study.get_trials(deepcopy=False)[trial.number].intermediate_values:
            trial.report(value, step)
        if trial.should_prune():
            self._pruned.add(trial.number)
        return trial.number in self._pruned

    def _finish_seed(self, trial: Trial, seed: int, result: Mapping[str, Any]) -> None:
        known = {name: value for name, value in result["logged"].items() if "/" in name}
        known |= {name: value for name, value in result.items() if isinstance(value, float)}
        value = _objective(self.file.objective, known)
        if value is None:  # no other trial will have it
            raise ConfigError(
                f"objective '{self.file.objective}' is no number of an evaluation or a log; known are "
                f"{', '.join(sorted(known))}.{did_you_mean(self.file.objective, known)} Fix the file, and name "
                "another directory with --dir."
            )
        scores = [*trial.user_attrs.get(SCORES, []), value]
        trial.set_user_attr(SCORES, scores)
        if len(scores) < self.file.seeds:
            self._waiting.append((trial, seed + 1))
            return
        self.study.tell(trial, float(iqm(np.array(scores))))
        self.write()

    def _fail(self, trial: Trial, error: str) -> None:
        trial.set_user_attr(ERROR, error)
        self.study.tell(trial, state=TrialState.FAIL)
        self.write()

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states or None)

    def _results(self) -> dict[str, Any]:
        best: float | None = None
        pick = max if self.file.direction == "maximize" else min
        trials: list[dict[str, Any]] = []
        for trial in self._trials():
            if trial.state == TrialState.COMPLETE and trial.value is not None:
                best = trial.value if best is None else pick(best, trial.value)
            entry = {"number": trial.number, "state": trial.state.name.lower(), "value": trial.value, "best": best}
            kept = {"scores": trial.user_attrs.get(SCORES, []), "error": trial.user_attrs.get(ERROR, "")}
            trials.append({**entry, "params": self._values(trial.params), **kept})
        complete = [trial for trial in trials if trial["state"] == "complete"]
        return {
            "version": 1,
            "objective": self.file.objective,
            "direction": self.file.direction,
            "best": pick(complete, key=lambda trial: trial["value"]) if complete else None,
            "importance": self._importance(len(complete)),
            "trials": trials,
        }

    def _importance(self, num_complete: int) -> dict[str, float]:
        if len(self.file.space) < 2 or num_complete < MIN_FOR_IMPORTANCE:
            return {}
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        return optuna.importance.get_param_importances(self.study, evaluator=evaluator)


def find_sweep(path: Path | None, resumed: Path | None, directory: Path | None) -> tuple[SweepFile, Path]:
    """Return what is searched, and where: the sweep file ``path``, or the sweep of the directory ``resumed``."""
    if (path is None) == (resumed is None):
        raise ConfigError("Give a sweep file, or --resume and the directory of a sweep.")
    if path is None:
        assert resumed is not None
        if directory is not None:
            raise ConfigError(f"--resume {resumed} stays in its own directory; leave --dir out.")
        stored = stored_sweep(resumed)
        if stored is None:
            raise RunDirError(f"{resumed} holds no sweep; name a directory that 'apexrl sweep' created.")
        return stored, resumed
    file, directory = read_sweep(path), directory or Path("sweeps") / path.stem
    stored = stored_sweep(directory)
    if stored is not None:
        check_same(file, stored, directory)
    return file, directory


def stored_sweep(directory: Path) -> SweepFile | None:
    """Return the sweep that a directory holds; None when it holds nothing."""
    path = directory / SWEEP
    if path.is_file():
        return sweep_from(parse_yaml(path.read_text(encoding="utf-8", errors="replace"), str(path)), str(path))
    if directory.is_file() or (directory.is_dir() and any(entry.name[0] != "." for entry in directory.iterdir())):
        raise RunDirError(f"{directory} holds something else than a sweep; name another directory with --dir.")
    return None


def check_same(asked: SweepFile, stored: SweepFile, directory: Path) -> None:
    """Refuse to resume another sweep than the one that a directory holds; the number of trials may change."""
    before, after = (
        {name: as_text(value) for name, value in sweep.to_dict().items() if name != "trials"}
        for sweep in (stored, asked)
    )
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if changed:
        raise ConfigError(
            f"{directory} holds a sweep with another '{changed[0]}'; name another directory with --dir, or resume "
            f"the old one with --resume {directory}."
        )


def _labels(dimension: Dimension) -> dict[CategoricalChoiceType, Any]:
    """Return what Optuna calls the choices of a field: as they are, lists and mappings by their JSON.

    Where that gives two choices one name, because true, 1 and 1.0 are equal in Python, all are called by their text.
    """
    distinct: dict[Any, Any] = {as_text(choice): choice for choice in dimension.choices}
    names: dict[Any, Any] = {
        json.dumps(choice, default=str) if isinstance(choice, list | dict) else choice: choice
        for choice in distinct.values()
    }
    return names if len(names) == len(distinct) else distinct


def _objective(name: str, logged: Mapping[str, Any]) -> float | None:
    """Return the objective from numbers by their log names; None when it is not there or not finite."""
    value = logged.get(name, logged.get(f"eval/{name}"))
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _repair_journal(path: Path) -> None:
    """Cut off a line that a kill left unfinished, and the lock of a process that is gone."""
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    if path.is_file() and not path.read_bytes().endswith(b"\n"):
        lines = [json.dumps(record, separators=(",", ":")) for record in read_json_lines(path)]
        files.replace_text(path, "".join(f"{line}\n" for line in lines))
