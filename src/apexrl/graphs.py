"""Make fixed-shape functions fast: captured as a CUDA graph, compiled, or run as they are.

The mathematics is the same in every mode, because it is the same function.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

WARM_UP_CALLS = 3
"""Calls that run eagerly before a capture: libraries set themselves up in them, and their results count."""


@dataclass(frozen=True, kw_only=True)
class Acceleration:
    """How hot functions run. None of it changes what is computed, but for rounding."""

    graphs: bool = True
    """Capture rollout and update as CUDA graphs; without CUDA it does nothing."""
    compile: bool = False
    """Compile policy and loss with ``torch.compile``; the first update then takes some ten seconds longer."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Of matrix products: tf32 is for CUDA; bf16 also runs the networks of the update in bfloat16."""

    def apply(self) -> None:
        """Set the precision of float32 matrix products for this process."""
        torch.set_float32_matmul_precision("highest" if self.precision == "fp32" else "high")


@dataclass
class _Entry:
    """What is known of one combination of input shapes."""

    calls: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    inputs: list[Tensor] = field(default_factory=list)
    output: Any = None


class Captured:
    """A function of tensors that is replayed as a CUDA graph once it has warmed up.

    The function must read and write the same memory at every call, apart from its arguments, which are copied. It may
    change tensors in place; what it returns is overwritten by the next call. A function that cannot be captured goes
    on eagerly, and one warning says why.

    Args:
        name: what a warning calls it.
        function: what to run.
        enabled: False always runs eagerly.
        generators: random generators that the function draws from, besides the default one.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], *, enabled: bool, generators: Sequence[torch.Generator] = ()
    ) -> None:
        self.name, self.function = name, function
        self.enabled = enabled and torch.cuda.is_available()
        self.generators = generators
        self.entries: dict[tuple[Any, ...], _Entry] = {}

    def __call__(self, *arguments: Tensor) -> Any:
        """Run the function: eagerly, or as its graph."""
        if not self.enabled:
            return self.function(*arguments)
        entry = self.entries.setdefault(tuple((a.shape, a.dtype) for a in arguments), _Entry())
        if entry.graph is None:
            if entry.calls < WARM_UP_CALLS:
                entry.calls += 1
                return self._warm_up(arguments)
            try:
                self._capture(entry, arguments)
            except RuntimeError as error:
                self.enabled = False
                self._release_generators()
                warnings.warn(
                    f"{self.name} cannot be captured as a CUDA graph and runs eagerly: {str(error).splitlines()[0]}",
                    stacklevel=2,
                )
                return self.function(*arguments)
        for static, argument in zip(entry.inputs, arguments, strict=True):
            static.copy_(argument)
        assert entry.graph is not None
        entry.graph.replay()
        return entry.output

    def forget(self) -> None:
        """Drop what was captured, because the function now works on other memory."""
        self.entries.clear()

    def _warm_up(self, arguments: tuple[Tensor, ...]) -> Any:
        # On a side stream, as capturing will be: autograd remembers the stream of its first backward pass.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            output = self.function(*arguments)
        torch.cuda.current_stream().wait_stream(stream)
        return output

    def _capture(self, entry: _Entry, arguments: tuple[Tensor, ...]) -> None:
        entry.inputs = [argument.clone() for argument in arguments]
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            entry.output = self.function(*entry.inputs)
        entry.graph = graph

    def _release_generators(self) -> None:
        # A capture that broke off leaves generators waiting for its end; a copy of their state does not.
        for generator in (torch.cuda.default_generators[torch.cuda.current_device()], *self.generators):
            generator.graphsafe_set_state(generator.clone_state())


def compiled(function: Callable[..., Any], *, enabled: bool, device: torch.device) -> Callable[..., Any]:
    """Compile a function for a device, or return it as it is.

    Compiled code draws the same random numbers as eager code, and its shapes are fixed. On a CPU the kernels are called
    from C++ rather than from Python, which for small networks takes longer than the kernels themselves.
    """
    if not enabled:
        return function
    import torch._inductor.config

    torch._inductor.config.fallback_random = True
    return torch.compile(function, dynamic=False, options={"cpp_wrapper": True} if device.type == "cpu" else None)


def without_guards(ready: bool) -> AbstractContextManager[Any]:
    """Skip the checks before each call of a compiled function, once it has been compiled for everything that comes.

    For small networks on a CPU the checks cost as much as a layer. Only for callers whose shapes do not change.
    """
    return torch.compiler.set_stance(skip_guard_eval_unsafe=True) if ready else nullcontext()


class Stopwatch:
    """Times phases on a device without waiting for it: marks are events, read when the work is done anyway."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []

    def mark(self, phase: str) -> None:
        """Begin a phase, and with it end the one before."""
        if self.on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((phase, event))
        else:
            self.marks.append((phase, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Return how long each phase but the last took; call it when the device has finished."""
        pairs = itertools.pairwise(self.marks)
        if self.on_cuda:
            return {phase: begin.elapsed_time(end) / 1e3 for (phase, begin), (_, end) in pairs}
        return {phase: end - begin for (phase, begin), (_, end) in pairs}
