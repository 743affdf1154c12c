"""Episodes of a task suite in Ray actors, on this machine or on a cluster."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from apexrl.collectors.ray_session import (
    Arrays,
    RaySession,
    Weights,
    first_line,
    load_weights,
    pack,
    portable,
    seed_everything,
    weights_of,
)
from apexrl.collectors.suite_runner import EPISODE_ID, SuiteRunner
from apexrl.envs.suite_env import SuiteVecEnv
from apexrl.envs.suites.base import InitState
from apexrl.errors import ConfigError, EnvError
from apexrl.policies.base import Policy
from apexrl.types import DONE, METRIC, VALID

MAX_DEATHS = 3
"""Workers that may die, in the same place, over one call."""


class RaySuiteRunner(SuiteRunner):
    """A ``SuiteRunner`` whose episodes are spread over Ray actors, each with environments and a copy of the policy.

    Every call sends the weights once, through Ray's object store, and each worker runs every ``num_workers``-th
    episode. A worker that dies is replaced, and its episodes are run again. The workers draw from seeds that come
    from PyTorch's generator here, so what is seeded or restored here repeats there.

    Args:
        make_env: makes the environments of one worker; must be picklable. It is also called here, for what there is
            to know of the suite; no simulator runs here, but for ``run_episodes`` with environments of its own.
        policy: its current weights act.
        num_workers: actors.
        worker_options: what Ray should know of an actor, such as ``num_cpus`` (1 when not given) or ``num_gpus``.
        on_message: told which workers die; the log when not given.
    """

    def __init__(
        self,
        make_env: Callable[[], SuiteVecEnv],
        policy: Policy,
        *,
        num_workers: int = 2,
        worker_options: Mapping[str, Any] | None = None,
        on_message: Callable[[str], None] | None = None,
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"RaySuiteRunner.num_workers must be at least 1, got {num_workers}.")
        super().__init__(make_env(), policy)
        self.on_message = on_message or logging.getLogger("apexrl").warning
        self.lost_rollouts = 0
        """Times that a worker died with the episodes it was running."""
        self._options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", **(worker_options or {}), "max_restarts": 0}
        self._ray = RaySession(num_workers)
        self._stop = weakref.finalize(self, self._ray.leave)
        self._factory = self._ray.put(make_env, "make_env")
        self._sent: tuple[Policy, Any] = policy, self._ray.put(portable(policy), "policy")
        self._actors = [self._new_actor() for _ in range(num_workers)]

    @torch.no_grad()
    def run_episodes(
        self,
        episodes: Sequence[InitState],
        *,
        keep: Collection[str] | None = None,
        deterministic: bool = False,
        env: SuiteVecEnv | None = None,
    ) -> TensorDict:
        """Run every episode to its end, as ``SuiteRunner`` does; with ``env``, in those environments and here.

        Raises:
            EnvError: when workers die again and again.
        """
        if env is not None:
            return super().run_episodes(episodes, keep=keep, deterministic=deterministic, env=env)
        if self.policy is not self._sent[0]:
            self._sent = self.policy, self._ray.put(portable(self.policy), "policy")
            for actor in self._actors:
                actor.follow.remote(self._sent[1])
        weights = self._ray.put(weights_of(self.policy), "weights")
        calls = []
        for index in range(min(len(self._actors), len(episodes))):
            seed = int(torch.randint(2**31 - 1, ()))
            part = list(episodes[index :: len(self._actors)])
            calls.append((part, None if keep is None else frozenset(keep), deterministic, weights, seed))
        return self._join(self._run(calls), len(episodes)).to(self.env.device)

    def close(self) -> None:
        """End the workers."""
        for actor in self._actors if self._stop.alive else ():
            self._ray.kill(actor)
        self._stop()

    def _new_actor(self) -> Any:
        return self._ray.remote(_SuiteWorker).options(**self._options).remote(self._factory, self._sent[1])

    def _run(self, calls: list[tuple[Any, ...]]) -> list[Arrays]:
        """Let worker ``i`` do call ``i``, again in a new worker where one dies."""
        refs = [actor.run.remote(*call) for actor, call in zip(self._actors, calls, strict=False)]
        index_of = {ref: index for index, ref in enumerate(refs)}
        found: dict[int, Arrays] = {}
        deaths = [0] * len(calls)
        while index_of:
            (ref, *_), _ = self._ray.wait(list(index_of), num_returns=1)
            index = index_of.pop(ref)
            try:
                found[index] = self._ray.get(ref)
            except self._ray.lost_errors as error:
                self.lost_rollouts += 1
                deaths[index] += 1
                if deaths[index] > MAX_DEATHS:
                    raise EnvError(
                        f"{deaths[index]} Ray workers died one after another over the same episodes. "
                        "Look into the messages of the simulator, or give each worker more memory."
                    ) from error
                self.on_message(
                    f"Ray worker {index} died ({first_line(error)}): its {len(calls[index][0])} episodes are run again."
                )
                self._ray.kill(self._actors[index])
                self._actors[index] = self._new_actor()
                index_of[self._actors[index].run.remote(*calls[index])] = index
        return [found[index] for index in range(len(calls))]

    def _join(self, parts: list[Arrays], num_episodes: int) -> TensorDict:
        """Put the episodes back into their columns, padded with zeros to the length of the longest."""
        T = max(part[(DONE,)].shape[0] for part in parts)
        batch = TensorDict({}, batch_size=[T, num_episodes])
        for key, first in parts[0].items():
            column = np.zeros((T, num_episodes, *first.shape[2:]), first.dtype)
            for index, part in enumerate(parts):
                column[: part[key].shape[0], index :: len(self._actors)] = part[key]
            batch[key] = torch.from_numpy(column)
        # Each worker numbers its own.
        batch[METRIC, EPISODE_ID] = torch.arange(float(num_episodes)).view(1, -1, 1) * batch[VALID]
        return batch


class _SuiteWorker:
    """What runs in an actor."""

    def __init__(self, make_env: Callable[[], SuiteVecEnv], policy: Policy) -> None:
        torch.set_num_threads(1)
        self.make_env, self.policy = make_env, copy.deepcopy(policy)
        self.runner: SuiteRunner | None = None

    def follow(self, policy: Policy) -> None:
        self.policy = copy.deepcopy(policy)
        if self.runner is not None:
            self.runner.policy = self.policy

    def run(
        self,
        episodes: list[InitState],
        keep: Collection[str] | None,
        deterministic: bool,
        weights: Weights,
        seed: int,
    ) -> Arrays:
        if self.runner is None:
            self.runner = SuiteRunner(self.make_env(), self.policy)
        load_weights(self.policy, weights)
        seed_everything(seed)
        return pack(self.runner.run_episodes(episodes, keep=keep, deterministic=deterministic))
