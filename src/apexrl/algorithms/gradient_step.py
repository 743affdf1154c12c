"""One way to take a gradient step, for every algorithm: minibatch, loss, gradient, all-reduce, step or skip."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from apexrl.algorithms.optimizer import FlatAdam
from apexrl.algorithms.terms import Term
from apexrl.core.system import distributed
from apexrl.core.system.acceleration import Acceleration
from apexrl.core.types import ACTION

RATE_BOUNDS = (1e-5, 1e-2)
"""Of a learning rate that follows the KL divergence."""


class UpdateStats:
    """How far an update is, on the device: whether it was stopped, and sums over the minibatches that took a step.

    Args:
        names: of the numbers that each step adds; those with an empty name are not reported.
        device: where the networks are.
        nonfinite: the flag of other statistics, where one number that is not finite stops both.
    """

    def __init__(self, names: Sequence[str], device: torch.device, nonfinite: Tensor | None = None) -> None:
        self.names, self.device = tuple(names), device
        self.stop = torch.zeros((), device=device)
        self.nonfinite = torch.zeros((), device=device) if nonfinite is None else nonfinite
        self.sums = torch.zeros(len(names) + 1, device=device)
        self.is_shared = nonfinite is not None

    @property
    def num_taken(self) -> Tensor:
        """Steps that were taken."""
        return self.sums[-1]

    def reset(self) -> None:
        """Begin a new update; a flag that is shared stays as it is."""
        for tensor in (self.stop, self.sums) if self.is_shared else (self.stop, self.sums, self.nonfinite):
            tensor.zero_()

    def report(self) -> dict[str, Tensor]:
        """Return the mean of each number over the minibatches that took a step; NaN when none did.

        With flags of its own also how many took one, and whether some number was not finite.
        """
        means = (self.sums[:-1] / self.sums[-1]).unbind()
        found = {name: mean for name, mean in zip(self.names, means, strict=True) if name}
        if not self.is_shared:
            found |= {"updates": self.sums[-1].clone(), "nonfinite": self.nonfinite.clone()}
        return found


class Loss(nn.Module):
    """A loss as a module, so that it is compiled, captured and differentiated as one piece.

    ``forward`` maps a minibatch to the loss, the numbers that are logged of it ``[K]``, of which the first is the loss,
    and whatever else the algorithm needs. All its parameters that learn are those of the optimizer.

    Args:
        acceleration: says in which precision networks run.
        terms: what is added.
    """

    name: str
    """What it is logged as, where an algorithm has several."""

    def __init__(self, acceleration: Acceleration, terms: Sequence[Term] = ()) -> None:
        super().__init__()
        self.acceleration = acceleration
        self.terms: Any = nn.ModuleList(terms)

    def result(
        self, loss: Tensor, numbers: Sequence[Tensor], minibatch: Mapping[str, Any], evaluation: Any
    ) -> tuple[Tensor, Tensor, tuple[()]]:
        """Add the terms to a loss, and theirs to the numbers that are logged of it."""
        values = [term.loss(minibatch, evaluation) for term in self.terms]
        total = loss
        for term, value in zip(self.terms, values, strict=True):
            total = total + term.weight * value
        return total, torch.stack([x.detach() for x in (loss, *numbers, *values)]), ()


class GradientStep:
    """Takes optimizer steps on a loss; the mean of the gradients where several processes learn together.

    Args:
        loss: of a minibatch.
        optimizer: what steps.
        stats: gets the numbers and the norm of the gradient.
        target_kl: stops the update once ``approx_kl`` exceeds 1.5 times this; None never does.
        desired_kl: what the learning rate follows, after every step; None leaves it alone.
        micro_batch_size: samples of one forward and backward pass at most, whose gradients are summed; a minibatch may
            then lie elsewhere than the parameters. None takes it at once.
        functional: differentiates a function of the flat parameters, so that forward and backward pass compile as one.
    """

    def __init__(
        self,
        loss: Loss,
        optimizer: FlatAdam,
        stats: UpdateStats,
        *,
        target_kl: float | None = None,
        desired_kl: float | None = None,
        micro_batch_size: int | None = None,
        functional: bool = False,
    ) -> None:
        self.loss, self.optimizer, self.stats = loss, optimizer, stats
        self.target_kl, self.desired_kl, self.micro_batch_size = target_kl, desired_kl, micro_batch_size
        self.functional = functional
        self._kl = stats.names.index("approx_kl") if "approx_kl" in stats.names else None
        learned = {id(parameter): name for name, parameter in optimizer.parameters.items()}
        # Every place of a parameter in the loss once, also where a module is reached on two ways.
        self._places = {
            f"{path}.{name}".lstrip("."): learned[id(parameter)]
            for path, module in loss.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if id(parameter) in learned
        }

    def __call__(self, minibatch: Mapping[str, Any] | None, weight: Tensor | float = 1.0) -> Any:
        """Take a step, unless the update was stopped before or a number of this step is not finite.

        Args:
            minibatch: what the loss takes; None where other processes have samples left and this one has not.
            weight: of this process in the mean over all: a number, or one per sample.

        Returns:
            What the loss returned besides numbers.
        """
        compute = self.value_and_grad if self.micro_batch_size is None else self._accumulate
        for term in self.loss.terms:
            minibatch = term.augment(minibatch) if minibatch is not None else None
        loss, numbers, more, gradient = self._nothing() if minibatch is None else compute(minibatch)
        loss, numbers, gradient = distributed.all_reduce_mean(loss, numbers, gradient, weight=weight)
        stats, optimizer = self.stats, self.optimizer
        with torch.no_grad():
            norm = gradient.norm()
            # Before the first step nothing has moved, and after the stop nothing moves: neither tells of the rate.
            ignored: Any = (stats.num_taken == 0) | (stats.stop > 0) if self.desired_kl is not None else None
            if self.target_kl is not None:
                stats.stop.copy_(torch.max(stats.stop, numbers[self._kl] > 1.5 * self.target_kl))
            stats.nonfinite.copy_(torch.max(stats.nonfinite, ~(loss + norm).isfinite()))
            skip = torch.max(stats.stop, stats.nonfinite)
            optimizer.step(gradient, norm, skip)
            if self.desired_kl is not None:
                self._adapt_learning_rate(numbers[self._kl], ignored | (stats.nonfinite > 0))
            # where, not a product: 0 · NaN is NaN
            stats.sums[:-1].add_(torch.where(skip == 0, torch.cat((numbers, norm.view(1))), 0.0))
            stats.sums[-1:].add_(skip == 0)
        return more

    def value_and_grad(self, minibatch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Any, Tensor]:
        """Return what the loss returns, and the flat gradient."""
        if not self.functional:
            loss, numbers, more = self.loss(minibatch)
            gradients = torch.autograd.grad(loss, list(self.optimizer.parameters.values()), materialize_grads=True)
            return loss.detach(), numbers, more, torch.cat([gradient.flatten() for gradient in gradients])

        def loss_at(flat: Tensor) -> tuple[Tensor, Any]:
            views = self.optimizer.views(flat)
            named = {place: views[name] for place, name in self._places.items()}
            loss, *others = torch.func.functional_call(self.loss, named, (minibatch,), tie_weights=False)
            return loss, others

        gradient, (loss, (numbers, more)) = torch.func.grad_and_value(loss_at, has_aux=True)(self.optimizer.flat)
        return loss, numbers, more, gradient

    def _accumulate(self, minibatch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Any, Tensor]:
        """Return the same of a minibatch, a micro-batch at a time, on the device of the parameters."""
        assert self.micro_batch_size is not None
        loss, numbers, _, gradient = self._nothing()
        count, here = len(minibatch[ACTION]), gradient.device
        for part in parts_of(minibatch, -(-count // self.micro_batch_size)):
            share = len(part[ACTION]) / count
            found = self.value_and_grad({name: value.to(here) for name, value in part.items()})
            loss, numbers, gradient = loss + share * found[0], numbers + share * found[1], gradient + share * found[3]
        return loss, numbers, (), gradient

    def _nothing(self) -> tuple[Tensor, Tensor, Any, Tensor]:
        numbers = self.stats.sums.new_zeros(len(self.stats.names) - 1)
        return numbers.new_zeros(()), numbers, (), torch.zeros_like(self.optimizer.flat)

    def _adapt_learning_rate(self, kl: Tensor, ignored: Tensor) -> None:
        """Follow the KL divergence of a minibatch; the one that stops the update lowers the rate."""
        assert self.desired_kl is not None
        low, high = RATE_BOUNDS
        rate = self.optimizer.learning_rate
        slower, faster = (rate / 1.5).clamp(min=low), (rate * 1.5).clamp(max=high)
        too_far = (kl > 2.0 * self.desired_kl) | (self.stats.stop > 0)
        followed = torch.where(too_far, slower, torch.where(kl < 0.5 * self.desired_kl, faster, rate))
        rate.copy_(torch.where(ignored, rate, followed))


def minibatches(batch: Mapping[str, Any], order: Tensor, num_parts: int, dim: int = 0) -> Iterator[dict[str, Any]]:
    """Put a batch into an order along a dimension, then cut it into minibatches as equal as possible."""
    size, more = divmod(len(order), num_parts)
    sizes = [size + (part < more) for part in range(num_parts)]
    parts = [value[(*[slice(None)] * dim, order)].split(sizes, dim) for value in batch.values()]
    return (dict(zip(batch, part, strict=True)) for part in zip(*parts, strict=True))


def parts_of(batch: Mapping[str, Any], num_parts: int) -> Iterator[dict[str, Any]]:
    """Cut a batch along its first dimension, without shuffling it; every entry by its own length, at least one row."""
    for part in range(num_parts):
        cut = {}
        for name, value in batch.items():
            start, end = part * len(value) // num_parts, (part + 1) * len(value) // num_parts
            cut[name] = value[start : max(start + 1, end)]
        yield cut
