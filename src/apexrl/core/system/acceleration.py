"""Make fixed-shape functions fast: captured as a CUDA graph, compiled, or run as they are.

The mathematics is the same in every mode, because it is the same function.
"""

from __future__ import annotations

import gc
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from apexrl.core.system import code_cache

Function = TypeVar("Function", bound=Callable[..., Any])
_compiling = threading.Lock()
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

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return the context in which networks run in the wanted precision."""
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def wrap(self, function: Function, device: torch.device, *, graph: str | None = None, **options: Any) -> Function:
        """Return a function to call instead: compiled, replayed as a graph, or itself when nothing of this is enabled.

        Args:
            function: see ``Compiled`` and ``Captured``.
            device: where it computes.
            graph: what a warning calls it, for a function that is captured as a CUDA graph and not compiled.
            options: of ``Captured``.
        """
        wrapped: Any = function
        if graph is None and self.compile:
            wrapped = Compiled(function, device)
        elif graph is not None and self.graphs and device.type == "cuda":
            wrapped = Captured(graph, function, **options)
        return wrapped  # type: ignore[no-any-return]


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
        generators: random generators that the function draws from, besides the default one.
        pool: memory that it may share with functions that return nothing either, from ``memory_pool``.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        generators: Sequence[torch.Generator] = (),
        pool: Any = None,
    ) -> None:
        self.name, self.function = name, function
        self.enabled = True
        self.generators = generators
        self.pool = pool
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
        with gc_paused(), torch.cuda.graph(graph, pool=self.pool):
            entry.output = self.function(*entry.inputs)
        entry.graph = graph

    def _release_generators(self) -> None:
        # A capture that broke off leaves generators waiting for its end; a copy of their state does not.
        for generator in (torch.cuda.default_generators[torch.cuda.current_device()], *self.generators):
            generator.graphsafe_set_state(generator.clone_state())


def memory_pool() -> Any:
    """Return memory for graphs that run one after another and leave nothing in it; None without CUDA."""
    return torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collect garbage now, and not again until the end: to free an old CUDA graph would break a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Compiled:
    """A function that is compiled at its first call, or runs as it is.

    Compiled code draws the same random numbers as eager code. What ``torch.compile`` checks before every call takes as
    long as a small network on a CPU, so after the first call only the shape of one tensor is looked at: of the first
    argument, or of the first entry of a dictionary there. Whatever is not a tensor stays as it was at the first call.
    On a CPU the function must also read and write the same memory at every call, apart from its arguments; where the
    compiler fails, it runs as it is, and one warning says why.

    Args:
        function: what to run; a graph break costs speed, nothing else.
        device: where it computes.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self.function = function
        self.on_cpu = device.type == "cpu"
        self._ready: dict[torch.Size | None, Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Run the function, compiled for this shape if it was not before."""
        first = arguments[0] if arguments else None
        if isinstance(first, dict):
            first = next(iter(first.values()))
        shape: torch.Size | None = getattr(first, "shape", None)
        if shape not in self._ready:
            with _compiling:
                self._ready[shape] = self._compile(arguments)
        return self._ready[shape](*arguments)

    def _compile(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        if not self.on_cpu:
            return self._compile_for_gpu(arguments)
        try:
            return code_cache.compile_function(self.function, arguments)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"Compilation failed, so this runs uncompiled: {reason}", stacklevel=3)
            return self.function

    def _compile_for_gpu(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        import torch._dynamo.config
        import torch._inductor.config

        torch._inductor.config.fallback_random = True
        function = self.function

        def call(*arguments: Any) -> Any:  # ahead of time, functions are compiled and methods are not
            return function(*arguments)

        whole: Any = torch.compile(call, dynamic=False, fullgraph=True)
        try:
            with torch._dynamo.config.patch(specialize_float=True), _from_entropy():
                ready = whole.aot_compile((arguments, {}))
        except Exception:  # a graph break, or something that it cannot write down: then as usual, with the checks
            return torch.compile(self.function, dynamic=False)
        ready.disable_guard_check()
        return ready  # type: ignore[no-any-return]


@contextmanager
def _from_entropy() -> Iterator[None]:
    """Let Python's random numbers be new ones for a while.

    PyTorch keeps what it compiles ahead of time under a random name. After the seed of a run that name would be the
    same in every run with this seed, and another function's code would be found under it.
    """
    state = random.getstate()
    random.seed()
    try:
        yield
    finally:
        random.setstate(state)
