"""The algorithm contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from pydantic import ConfigDict
from tensordict import TensorDict
from torch import Tensor, nn

from apexrl.core.errors import ConfigError, DivergenceError, did_you_mean
from apexrl.core.observations import leaves
from apexrl.core.plugins import module_hint
from apexrl.core.system import distributed
from apexrl.core.types import (
    ACTION,
    DONE,
    NEXT_VALUE,
    OBSERVATION,
    REWARD,
    SAMPLE_LOG_PROB,
    TERMINATED,
    TRUNCATED,
    VALUE,
    Observation,
)
from apexrl.policies import ActorCritic, Policy
from apexrl.policies.config import POLICIES

MAX_BEHAVIOUR_WEIGHT = 2.0
"""Most that a sample of older weights counts for being likelier under the policy at the start of the update."""


Options = TypeVar("Options", bound="AlgorithmConfig")
Source = Literal["steps", "groups", "demonstrations"]
"""What batches are made of: steps of running episodes, groups of whole episodes that start alike, demonstrations."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """What a run asks of the options of any algorithm, besides their fields."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(use_attribute_docstrings=True)
    name: str = ""
    """The algorithm."""
    # Without annotations: no fields here, though a subclass may make them such.
    num_updates = 0
    """Iterations of a whole training; 0 where the algorithm leaves them to the schedule."""
    demo_reader = ""
    """The option that reads demonstrations while training, for messages; empty where none does."""

    def check_policy(self, policy: type[Policy]) -> None:
        """Raise when options do not fit the kind of policy."""

    def check_rollout(self, num_envs: int, *, keeps_sequences: bool) -> None:
        """Raise when rollouts of this many environments cannot be learned from."""

    def num_gradient_steps(self, total_steps: int, num_envs: int) -> int:
        """Return about how many gradient steps so many environment steps bring, where compiling them can win time."""
        return 0

    def imitation(self, init_from: str) -> AlgorithmConfig | None:
        """Return the imitation that a run begins with, unless it starts from trained weights (``init_from``)."""
        return None

    def without_demos(self) -> Self:
        """Return the options without those that read demonstrations."""
        return self

    def warning(self, init_from: str) -> str:
        """Return what the user should know as a run starts from these weights; an empty string for nothing."""
        return ""


class BaseAlgorithm(ABC):
    """Turns a batch into a parameter update. A new algorithm implements ``update``."""

    config_class: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    """Its options, a dataclass: the section ``algo`` of a configuration."""
    required_keys: ClassVar[frozenset[str]] = frozenset(
        {OBSERVATION, ACTION, REWARD, TERMINATED, TRUNCATED, DONE, VALUE, NEXT_VALUE, SAMPLE_LOG_PROB}
    )
    """What ``update`` reads; the collector stores these and no more. By default all that on-policy learning can use."""
    on_policy: ClassVar[bool] = True
    """Whether batches must come from the current policy."""
    learns_from: ClassVar[Source] = "steps"
    """What ``update`` takes; a task says which of these it has."""
    policies: ClassVar[Mapping[str, type[Policy]]] = {"mlp": ActorCritic}
    """Policy of each ``policy.kind`` that the algorithm can train."""
    shared_fields: ClassVar[Mapping[str, Callable[[int, str], int]] | None] = None
    """Fields of the configuration that several processes split, and how; None: it learns in one process only."""
    own_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of ``state_dict`` whose values differ between processes that learn together."""
    advice_without_steps: ClassVar[str] = ""
    """What to change when a whole run took no optimizer step."""

    def __init__(self, policy: Policy, cfg: Any = None, num_steps: int | None = None) -> None:
        self.policy = policy
        self.rollout_policy = policy
        """What acts while training collects; evaluation always uses ``policy``."""
        self.cfg: Any = own_config(cfg, self.config_class)
        self.num_steps: int = num_steps or int(getattr(self.cfg, "num_steps", 32))
        """Steps of each environment in one rollout."""

    @classmethod
    def policy_class(cls, kind: str) -> type[Policy]:
        """Return the policy that ``policy.kind`` means: one of ``policies``, or a policy or an actor of a user."""
        own = cls.policies.get(kind) or POLICIES.find(kind)
        if own is None:
            known = [*cls.policies, *POLICIES.names()]
            raise ConfigError(
                f"policy.kind must be one of {known} for {cls.__name__}, or module:Class, got '{kind}'."
                f"{module_hint(kind) or did_you_mean(kind, known)}"
            )
        if issubclass(own, Policy):
            return own
        if "mlp" not in cls.policies:
            raise ConfigError(f"policy.kind '{kind}' is an actor network, and {cls.__name__} takes none; use a Policy.")
        return cls.policies["mlp"]

    @torch.no_grad()
    def get_action(self, obs: Observation, deterministic: bool = False) -> Tensor:
        """Return the actions ``[N, A]`` for observations ``[N, ...]``, on their device.

        Args:
            obs: observations.
            deterministic: as an evaluation acts, with ``policy``; otherwise as training does, with ``rollout_policy``.

        Raises:
            ConfigError: for a policy with memory, which observations alone do not say.
        """
        policy = self.policy if deterministic else self.rollout_policy
        if policy.initial_memory(1):
            name = type(policy).__name__
            raise ConfigError(f"get_action has no memory for {name}; call policy.act(carry), or runner.rollout.")
        carry = {OBSERVATION: obs.to(policy.device), **policy.initial_state(obs.shape[0])}
        was_training = policy.training
        policy.eval()
        action = policy.act(carry, deterministic)[ACTION]
        policy.train(was_training)
        return action.to(obs.device or action.device)

    @abstractmethod
    def update(self, rollout: TensorDict) -> dict[str, Tensor]:
        """Improve the policy with one batch ``[T, N]``; returns 0-d tensors, still on the device.

        A metric called ``nonfinite`` above 0 says that a loss or gradient was not finite and that no step was taken
        from there on; ``raise_diverged`` turns it into a report, as it does any number that is not finite where that
        metric is missing. One called ``updates`` counts the optimizer steps
        that were taken; a run that took none says so at its end.
        """

    def remember(self, demonstrations: TensorDict, *, is_new: bool = True) -> None:
        """Get ready to learn from demonstrations ``[M]``, as ``load_demos`` returns them.

        Args:
            demonstrations: stay the same for the whole training.
            is_new: the policy was not trained before, with statistics of its own.
        """
        return

    def begin_trained(self, init_std: float) -> None:
        """Begin with a policy that was trained before; ``init_std`` is the exploration that was asked for."""
        return

    def initial_tensors(self) -> list[Tensor]:
        """Return what processes that learn together must begin with alike: the policy, and copies made of it."""
        return list(self.policy.state_dict().values())

    def notice(self, batch: TensorDict) -> str | None:
        """Return what the user should know before the first update with batches like this one."""
        return None

    @classmethod
    def critic_options(cls, cfg: Any) -> dict[str, Any]:
        """Return the options of the critics that the algorithm's configuration holds."""
        return {}

    def adjust_learning_rate(self, progress: float) -> None:
        """Follow a schedule over the whole training; ``progress`` runs from 0 to 1."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Return what the algorithm needs to continue, without the policy, as tensors and plain values.

        By default, the state of every optimizer, scheduler and module that is one of its attributes.
        """
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Any]:
        """Return the attributes that have a state, besides the policy."""
        kinds = torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, nn.Module
        parts = {name: part for name, part in vars(self).items() if isinstance(part, kinds)}
        return {name: part for name, part in parts.items() if part is not self.policy}

    def without_own_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a ``state_dict`` without what is of no use to another number of processes than wrote it."""
        return state

    def check_batch(self, batch: TensorDict) -> None:
        """Raise when the batch lacks a key that ``update`` reads."""
        missing = self.required_keys - set(batch.keys())
        if missing:
            name = type(self).__name__
            raise KeyError(
                f"{name}.update needs {sorted(missing)}; the batch has {sorted(batch.keys())}. "
                f"Collect with keep={name}.required_keys; a collector of your own must add them to its batch."
            )

    def raise_diverged(self, batch: TensorDict) -> None:
        """Stop the run after an update that was not finite.

        Raises:
            DivergenceError: names the first tensor that is not finite, in the order in which data flows.
        """
        # What is not finite in one process is soon so in all: the nearest to the cause reports.
        _, report = min(distributed.all_gather_object(self._report(batch)), key=lambda found: found[0])
        raise DivergenceError(report)

    def _report(self, batch: TensorDict) -> tuple[int, str]:
        """Return how far down the flow of data the first tensor that is not finite lies, and a text that names it."""
        parameters = dict(self.policy.named_parameters())
        for name, parameter in parameters.items():
            if not parameter.isfinite().all():
                return 0, f"Training diverged: parameter '{name}' was not finite before the update. Load a checkpoint."
        order = [OBSERVATION, ACTION, REWARD, SAMPLE_LOG_PROB]
        # A metric may be missing at a step: NaN means just that there.
        keys = sorted({str(key) for key in batch.keys()} - {"metric", "log"} - {*order})  # noqa: SIM118
        for place, key in enumerate([*(key for key in order if key in batch), *keys], 1):
            for path, tensor in leaves(batch.select(key)).items():
                if tensor.is_floating_point() and (bad := ~tensor.isfinite()).any():
                    step, env = bad.nonzero()[0, :2].tolist()
                    return place, (
                        f"Training diverged: '{path}' of the rollout is not finite at {int(bad.sum())} of "
                        f"{bad.numel()} places, first at step {step}, environment "
                        f"{env + distributed.rank() * batch.shape[1]}. The environment or the policy produced it; see "
                        "docs/troubleshooting.md."
                    )
        last, fix = len(order) + len(keys) + 1, "Lower algo.learning_rate, or normalise observations and rewards."
        for name, parameter in parameters.items():
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                return last, f"Training diverged: the gradient of '{name}' is not finite, though the rollout is. {fix}"
        return last + 1, f"Training diverged: the loss was not finite. {fix}"


def check_source(algorithm: str, env: Any, policy: Policy | None) -> None:
    """Raise unless an algorithm got a policy, or an environment to create one for."""
    if isinstance(env, Policy):
        raise ConfigError(f"{algorithm} takes an environment first; name the policy: {algorithm}(policy=...).")
    if (env is None) == (policy is None):
        raise ConfigError(f"{algorithm} needs either a policy (policy=...) or an environment (env=...).")
    if not isinstance(policy, Policy | None):
        raise ConfigError(
            f"{algorithm} needs a Policy, got {type(policy).__name__}; give networks of your own as actor_class and "
            "critic_class, or write a subclass of Policy."
        )


def own_config(cfg: Any, kind: type[Options]) -> Options:
    """Return the options of an algorithm, the defaults when none are given; refuse those of another algorithm."""
    if not isinstance(cfg, kind | None):
        raise ConfigError(f"cfg must be a {kind.__name__}, got a {type(cfg).__name__}.")
    return kind() if cfg is None else cfg


def find_device() -> torch.device:
    """CUDA when there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
