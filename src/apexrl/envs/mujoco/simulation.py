"""What ``MujocoVecEnv`` needs around MuJoCo: models that differ, and threads."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from apexrl.core.errors import EnvError

Randomize: TypeAlias = Callable[[Any, np.random.Generator], None]
"""Changes an ``MjModel`` in place."""


def make_models(
    load: Callable[[], Any], num_envs: int, models: Sequence[Any] | None, randomize: Randomize | None, seed: int
) -> tuple[tuple[Any, ...], Any]:
    """Return a model for each environment (one model N times when they need not differ), and what they differ from.

    Raises:
        EnvError: when there are not N models or their sizes differ.
    """
    if models is not None and len(models) != num_envs:
        raise EnvError(f"MujocoVecEnv needs a model for each of {num_envs} environments, got {len(models)}.")
    base = load() if models is None else copy.copy(models[0])
    models = [base] * num_envs if models is None else models
    names = ("nq", "nv", "na", "nu", "nbody", "nuserdata")
    sizes = [{name: getattr(model, name) for name in names} for model in models]
    for i, size in enumerate(sizes):
        if size != sizes[0]:
            raise EnvError(f"All models need the same sizes: environment 0 has {sizes[0]}, environment {i} has {size}.")
    if randomize is not None:
        models = [copy.copy(model) for model in models]
        for i, model in enumerate(models):
            randomize(model, np.random.default_rng([seed, i]))
    return tuple(models), base


def _parameters(model: Any) -> dict[str, tuple[Any, str]]:
    """Where the numbers of a model are: the object that has them and the attribute, by name."""
    arrays = [name for name in dir(model) if not name.startswith("_")]
    found = {name: (model, name) for name in arrays if isinstance(getattr(model, name), np.ndarray)}
    for part in ("opt", "stat"):  # the solver stops by the mean inertia of the latter
        owner = getattr(model, part)
        found |= {f"{part}.{name}": (owner, name) for name in dir(owner) if not name.startswith("_")}
    return found


def model_differences(base: Any, models: Sequence[Any]) -> dict[str, Tensor]:
    """Return the parameters ``[N, ...]`` in which any of the models differs from ``base``."""
    every = [_parameters(model) for model in models]
    found = {}
    for name, (owner, attribute) in _parameters(base).items():
        ours = getattr(owner, attribute)
        theirs = [getattr(*parameters[name]) for parameters in every]
        if not all(np.array_equal(ours, value) for value in theirs):
            found[name] = torch.from_numpy(np.array(theirs))
    return found


def set_model_differences(base: Any, models: Sequence[Any], saved: Mapping[str, Tensor]) -> None:
    """Make the models differ from ``base`` as ``model_differences`` says, and in nothing else."""
    origin, every = _parameters(base), [_parameters(model) for model in models]
    for name in {*saved, *model_differences(base, models)}:
        values = saved[name].cpu().numpy() if name in saved else [getattr(*origin[name])] * len(models)
        for parameters, value in zip(every, values, strict=True):
            owner, attribute = parameters[name]
            if isinstance(getattr(owner, attribute), np.ndarray):
                getattr(owner, attribute)[...] = value
            else:
                setattr(owner, attribute, value.item() if isinstance(value, np.generic) else value)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Threads:
    """Calls a function in this thread and in others at the same time.

    The calls share the work out among themselves, so one that finds none left need not be made.

    Args:
        num_threads: how many call it, this one included.
    """

    def __init__(self, num_threads: int) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._answers: SimpleQueue[BaseException | None] = SimpleQueue()
        self._num_others = num_threads - 1
        self._closed = False
        for _ in range(self._num_others):
            threading.Thread(target=_serve, args=(self._jobs, self._answers), daemon=True).start()

    def run(self, job: Callable[[], None]) -> None:
        """Call ``job`` here and in threads that are free, return when all have, and raise what one of them raised."""
        if self._closed:
            raise EnvError("The environments are closed.")
        for _ in range(self._num_others):
            self._jobs.put(job)
        try:
            job()
        finally:
            # On a busy machine a thread may not have woken yet: the work is done, so do not wait for it.
            num_called = self._num_others
            with contextlib.suppress(Empty):
                while True:
                    self._jobs.get_nowait()
                    num_called -= 1
            answers = [self._answers.get() for _ in range(num_called)]
        for error in answers:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads."""
        self._closed = True
        for _ in range(self._num_others):
            self._jobs.put(None)


def _serve(jobs: SimpleQueue[Callable[[], None] | None], answers: SimpleQueue[BaseException | None]) -> None:
    while (job := jobs.get()) is not None:
        raised = None
        try:
            job()
        except BaseException as error:  # raised again by the thread that waits for the answer
            raised = error
        answers.put(raised)
        del job, raised  # they would keep the environments alive until the next one
