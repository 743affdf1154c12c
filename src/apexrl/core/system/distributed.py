"""Several processes that learn together, as ``torchrun`` starts them; in a single process nothing here does anything.

Every process steps environments of its own. What they learn from them is averaged or merged here, so that all of them
hold the same weights and statistics, and take the same decisions. Process 0 alone writes.
"""

from __future__ import annotations

import atexit
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from apexrl.core.errors import ApexRLError, ConfigError
from apexrl.core.system.seeding import POLICY, spawn_seed

TIMEOUT_VARIABLE = "APEXRL_RANK_TIMEOUT"
"""Environment variable: seconds after which a process that does not answer counts as lost."""
DEFAULT_TIMEOUT = 600.0
"""A process that ends is noticed at once; this is for those that hang, and must outlast the slowest rollout."""
COLLECTIVE_TIMEOUT = timedelta(days=1)
"""How long the others wait while process 0 evaluates or writes."""
T = TypeVar("T")
_patient: Any = None
"""The group in which processes wait for the work of the first one; None is the default group."""


class LostRankError(ApexRLError, RuntimeError):
    """Another process of the run has ended or does not answer."""


def _started_by_torchrun() -> bool:
    is_rank = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    return is_rank and int(os.environ["WORLD_SIZE"]) > 1


def own_device(device: torch.device) -> torch.device:
    """Return the device of this process: of several on a host, each has a GPU of its own."""
    if device.type != "cuda" or not _started_by_torchrun():
        return device
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"torchrun started process {index} of this host, which has {torch.cuda.device_count()} GPUs; lower "
            "--nproc_per_node, or use --training.device cpu."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def join_ranks(device: torch.device) -> None:
    """Join the other processes that ``torchrun`` started, if any; only the first continues to print."""
    global _patient
    if not _started_by_torchrun() or dist.is_initialized():
        return
    timeout = timedelta(seconds=_timeout())
    with _naming_the_cause():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        _patient = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    atexit.register(_leave_ranks)
    if not is_main_process():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123


def _leave_ranks() -> None:
    with suppress(Exception):
        dist.destroy_process_group()


def _timeout() -> float:
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < COLLECTIVE_TIMEOUT.total_seconds():
        raise ConfigError(f"{TIMEOUT_VARIABLE} must be a positive number of seconds, got '{text}'.")
    return seconds


@contextmanager
def _naming_the_cause() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(
            "The other processes are lost: one of them has ended, or did not answer "
            f"within {_timeout():g} s ({TIMEOUT_VARIABLE}). "
            "The first error that a process printed says why; after a kill it is torchrun's 'Root Cause'."
        ) from error


def world_size() -> int:
    """Return the number of processes that learn together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def is_main_process() -> bool:
    """Whether this is the process that writes."""
    return rank() == 0


def share(amount: int, name: str) -> int:
    """Return this process's part of a number that all share equally, or raise about the field ``name``."""
    if amount % world_size():
        size = world_size()
        raise ConfigError(f"{name} is {amount}, which {size} processes cannot share equally; use a multiple of {size}.")
    return amount // world_size()


def share_rounded(amount: int, _: str) -> int:
    """Return this process's part of a number that need not be split exactly, rounded up."""
    return -(-amount // world_size())


def seed_per_rank(seed: int, total_steps: int = 0) -> None:
    """Let the global random generators of every process but the first draw their own numbers, after so many steps."""
    if not is_main_process():
        own = spawn_seed(seed, POLICY, rank(), total_steps)
        torch.manual_seed(own)
        random.seed(own)
        np.random.seed(own)


@torch.no_grad()
def all_reduce_mean(*tensors: Tensor, weight: Tensor | float = 1.0) -> tuple[Tensor, ...]:
    """Average tensors of one dtype over the processes, Σ w x / Σ w, in one exchange; a single process changes nothing.

    w may be given per sample, and is then added up. A number that is not finite in one process is so in all afterwards.
    """
    if world_size() == 1:
        return tensors
    first = tensors[0]
    weight = torch.as_tensor(weight, dtype=first.dtype, device=first.device).sum().reshape(1)
    flat = torch.cat([*(tensor.detach().reshape(-1) * weight for tensor in tensors), weight])
    with _naming_the_cause():
        dist.all_reduce(flat)
    # No weight anywhere means that there is nothing to average, and all of it is 0.
    parts = torch.split(flat[:-1] / flat[-1].clamp_min(1e-12), [tensor.numel() for tensor in tensors])
    return tuple(part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))


@torch.no_grad()
def all_gather(x: Tensor) -> Tensor:
    """Return ``[W · len(x), ...]``: the tensors of all W processes, which have the same shape, one after the other."""
    if world_size() == 1:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world_size())]
    with _naming_the_cause():
        dist.all_gather(parts, x.detach().contiguous())
    return torch.cat(parts)


def all_gather_rows(x: Tensor) -> tuple[Tensor, slice]:
    """Return ``all_gather`` of tensors that may differ in length, and which rows of it are this process's."""
    if world_size() == 1:
        return x, slice(None)
    parts = all_gather_object(x.detach().cpu())
    start = sum(len(part) for part in parts[: rank()])
    return torch.cat(parts).to(x.device), slice(start, start + len(x))


def merged_moments(count: int, average: Tensor, var: Tensor) -> tuple[int | Tensor, Tensor, Tensor]:
    """Merge sample counts n, means m and variances v of all processes exactly.

    N = Σ n,  M = Σ n m / N,  V = Σ n (v + (m − M)²) / N
    """
    if world_size() == 1:
        return count, average, var
    parts = all_gather(torch.stack((torch.full_like(average, count), average, var)).unsqueeze(0))
    counts, means, variances = parts.unbind(1)
    count_of_all = counts.sum(0)
    merged = (counts * means).sum(0) / count_of_all
    spread = (counts * (variances + (means - merged).square())).sum(0) / count_of_all
    return count_of_all.reshape(-1)[0], merged, spread


@torch.no_grad()
def all_ranks(flag: Tensor) -> Tensor:
    """Say on the device whether a 0-d truth holds in every process."""
    return flag if world_size() == 1 else all_gather(flag.reshape(1).byte()).bool().all()


@torch.no_grad()
def any_rank(flag: Tensor) -> Tensor:
    """Say on the device whether a 0-d truth holds in some process."""
    return flag if world_size() == 1 else all_gather(flag.reshape(1).byte()).bool().any()


def all_reduce_max(number: int) -> int:
    """Return the largest of the processes' numbers."""
    return max(all_gather_object(number))


def all_gather_object(value: T) -> list[T]:
    """Return the plain values of all processes, in their order."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    with _naming_the_cause():
        dist.all_gather_object(values, value)
    return values


def gather_object(value: T) -> list[T]:
    """Return the values of all processes to the first one, an empty list to the others."""
    if world_size() == 1:
        return [value]
    values: list[Any] | None = [None] * world_size() if is_main_process() else None
    with _naming_the_cause():
        dist.gather_object(value, values, dst=0, group=_patient)
    return values or []


def on_main_process(function: Callable[[], T]) -> T:
    """Call a function in the first process and give all what it returned; the others wait, and exit if it failed."""
    if world_size() == 1:
        return function()
    outcome: list[Any] = [None, "failed"]
    try:
        if is_main_process():
            outcome = [function(), "returned"]
    finally:
        with _naming_the_cause():
            dist.broadcast_object_list(outcome, src=0, group=_patient)
    if outcome[1] == "failed":
        raise SystemExit(2)
    return cast(T, outcome[0])


@torch.no_grad()
def broadcast_parameters(tensors: Iterable[Tensor]) -> None:
    """Give every process the first one's numbers, in place."""
    if world_size() == 1:
        return
    with _naming_the_cause():
        for tensor in tensors:
            contiguous = tensor.contiguous()  # the tensor itself, where it is
            dist.broadcast(contiguous, src=0)
            tensor.copy_(contiguous)
