"""Ray itself, and how policies and rollouts travel through it: as plain arrays, which its workers share."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import random
import socket
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from apexrl.core import plugins
from apexrl.core.errors import ConfigError
from apexrl.core.types import DONE, METRIC, NEXT_OBSERVATION, OBSERVATION
from apexrl.policies.base import Policy
from apexrl.rollout import LOG

Key = tuple[str, ...]
Arrays = dict[Key, NDArray[Any]]
"""The leaves of a batch; what follows the last step of an episode or of the rollout is packed, ``[R, ...]``."""
Weights = dict[str, NDArray[Any]]

OBJECT_STORE_BYTES = 2 * 2**30
"""Shared memory of a Ray that is started here, at most; rollouts and weights lie in it."""
CONNECT_SECONDS = 10.0
"""How long the host of ``RAY_ADDRESS`` may take to answer."""


class RaySession:
    """Ray, as far as it is needed: started or joined by the first, and ended by the last, if it was started here.

    Args:
        num_workers: actors that a Ray started here must have room for, each on one CPU.
    """

    _open = 0
    _started_here = False

    def __init__(self, num_workers: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("Collecting with Ray needs it: pip install 'apexrl[ray]'.") from error
        self._ray: Any = ray
        self.wait, self.get, self.remote = ray.wait, ray.get, ray.remote
        errors = ray.exceptions
        self.lost_errors = (errors.RayActorError, errors.ObjectLostError, errors.OutOfMemoryError)
        """What a call raises when its actor died, or its node with the result."""
        if not ray.is_initialized():
            self._connect(num_workers)
        RaySession._open += 1

    def _connect(self, num_workers: int) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # What the simulators print stays in Ray's own log files.
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        address = os.environ.get("RAY_ADDRESS", "local")
        if address != "local":
            _check_reachable(address)
            try:
                self._ray.init(**quiet)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(f"There is no Ray at RAY_ADDRESS={address}: {first_line(error)}") from error
            return
        self._ray.init(
            address="local",
            num_cpus=max(num_workers, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=min(OBJECT_STORE_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 5),
            # Ray gives its workers way to everything else by default; the learner waits for these.
            _system_config={"worker_niceness": 0},
            **quiet,
        )
        RaySession._started_here = True

    def room(self, options: Mapping[str, Any]) -> str:
        """Say what each actor with these options needs, and what the cluster has of it."""
        needs = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus"), **options.get("resources", {})}
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        has = {name: f"{free.get(name, 0):g} of {total.get(name, 0):g} free" for name in needs}
        parts = [f"{number:g} {name} ({has[name]})" for name, number in needs.items() if number]
        return f"Each needs {' and '.join(parts)}."

    def put(self, value: Any, name: str) -> Any:
        """Put a value into the object store, once for all workers."""
        try:
            return self._ray.put(plugins.with_imports(value))
        except TypeError as error:
            advice = "Use a function of a module, or functools.partial of one."
            raise ConfigError(f"{name} cannot be sent to Ray workers: {first_line(error)} {advice}") from error

    def kill(self, actor: Any) -> None:
        """End an actor at once, if it is not dead already."""
        with contextlib.suppress(Exception):
            self._ray.kill(actor, no_restart=True)

    def leave(self) -> None:
        """End Ray, where nobody needs it any more and it was started here."""
        RaySession._open -= 1
        if RaySession._started_here and RaySession._open == 0:
            RaySession._started_here = False
            self._ray.shutdown()


def portable(policy: Policy) -> Policy:
    """Return a copy of a policy for another process: on the CPU, each parameter in memory of its own."""
    twin = copy.deepcopy(policy).cpu().eval()
    for parameter in twin.parameters():
        # Optimizers keep parameters as views of one tensor, which would be sent as a whole with each of them.
        parameter.data = parameter.data.clone()
    return twin


def weights_of(policy: Policy) -> Weights:
    """Return the weights and statistics of a policy as arrays."""
    return {name: _array(value.detach()) for name, value in policy.state_dict().items()}


def load_weights(policy: Policy, weights: Weights) -> None:
    """Load ``weights_of`` another policy."""
    policy.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})


def seed_everything(seed: int) -> None:
    """Seed the global random generators of this process."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def pack(batch: TensorDict) -> Arrays:
    """Return the leaves of a batch as arrays, and successors only where they are not the next step's observation."""
    ends = _ends(batch[DONE])
    arrays: Arrays = {}
    for key, value in batch.items(include_nested=True, leaves_only=True):
        path = (key,) if isinstance(key, str) else tuple(key)
        leaf = cast(Tensor, value)
        arrays[path] = _array(leaf[ends] if path[0] == NEXT_OBSERVATION else leaf)
    return arrays


def side_by_side_arrays(parts: list[Arrays]) -> TensorDict:
    """Put what ``pack`` returned side by side, ``[T, N]``; a metric that a part does not have is NaN there."""
    T = parts[0][(DONE,)].shape[0]
    widths = [part[(DONE,)].shape[1] for part in parts]
    batch = TensorDict({}, batch_size=[T, sum(widths)])
    for key in dict.fromkeys(key for part in parts for key in part if key[0] != NEXT_OBSERVATION):
        columns = [
            part[key] if key in part or key[0] not in (METRIC, LOG) else np.full((T, width, 1), np.nan, np.float32)
            for part, width in zip(parts, widths, strict=True)
        ]
        batch[key] = torch.from_numpy(np.concatenate(columns, 1))
    starts = np.cumsum([0, *widths])
    for key in (key for key in parts[0] if key[0] == NEXT_OBSERVATION):
        obs: Tensor = batch[OBSERVATION, *key[1:]]
        successor = torch.cat((obs[1:], obs[-1:]))
        for part, start, width in zip(parts, starts, widths, strict=False):
            ends = _ends(torch.tensor(part[(DONE,)]))
            successor[:, start : start + width][ends] = torch.tensor(part[key])
        batch[key] = successor
    return batch


def _ends(done: Tensor) -> Tensor:
    """Say after which steps ``[T, N]`` the next observation is not the successor: at ends of episodes, and the last."""
    ends = done.squeeze(-1).clone()
    ends[-1] = True
    return ends


def _array(value: Tensor) -> NDArray[Any]:
    value = value.cpu().contiguous()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def first_line(error: BaseException) -> str:
    """Return the first line of a message that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _check_reachable(address: str) -> None:
    """Raise when nobody listens at ``host:port``: Ray itself would try for minutes. Other addresses are Ray's."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"There is no Ray at RAY_ADDRESS={address}: {error}. Start it there with 'ray start --head', or unset it."
        ) from error
