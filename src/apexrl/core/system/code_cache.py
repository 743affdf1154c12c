"""Compile a function of tensors for the CPU, and keep the machine code for the next run.

The function is traced with its gradient into one graph of operations. The graph, versions and processor are the key
under which the code lies in the user's own cache directory, so nothing can be loaded for a function that has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._prims_common import clone_preserve_strides
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

CODE_FORMAT = 3
"""Of what lies in the cache; another one finds nothing of this."""
OPTIONS: dict[str, Any] = {
    "fallback_random": True,  # the random numbers of eager code
    "cpp.use_decompose_tanh": True,  # exact tanh takes as long as the matrix products of a small network
    # Code that calls kernels; the kernels themselves are optimised.
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
    "aot_inductor.package": True,
    "use_joint_graph_passes": False,  # they look for attention
}


QUICK_GXX = " -pipe --param ggc-min-expand=1000 --param ggc-min-heapsize=4000000"
"""Lets g++ take memory instead of collecting its garbage."""


# The bias of a matrix product would be copied by a kernel of its own, and an outer product be a matrix product;
# as operations on elements both are part of the kernels around them.
_FUSABLE: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.addmm.default: lambda bias, x, weight, **scale: NotImplemented if scale else x.mm(weight) + bias,
    torch.ops.aten.baddbmm.default: lambda bias, x, weight, **scale: NotImplemented if scale else x.bmm(weight) + bias,
    torch.ops.aten.bmm.default: lambda x, y: x * y if x.shape[-1] == 1 else NotImplemented,
}


class Traced:
    """A function as a graph, whose inputs are the tensors of its arguments, then the memory it reaches otherwise.

    Args:
        function: what is traced, without being run. It may change tensors in place, and nothing else.
        arguments: of a call; whatever is no tensor stays as it is.
    """

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx

        leaves, spec = pytree.tree_flatten(tuple(arguments))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        def run(tensors: Sequence[Tensor]) -> tuple[list[Any], pytree.TreeSpec]:
            given = iter(tensors)
            values = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return pytree.tree_flatten(function(*pytree.tree_unflatten(values, spec)))

        with (fake := FakeTensorMode()), _StandIns(fake.from_tensor) as found:
            _, self.out_spec = run([fake.from_tensor(x) for x in inputs])
        self.reached = found.wholes

        def traced(*tensors: Tensor) -> list[Any]:
            given = iter(tensors[len(inputs) :])
            with _StandIns(lambda _: next(given)):
                return run(tensors[: len(inputs)])[0]

        self.module = make_fx(traced, _FUSABLE, tracing_mode="fake")(*inputs, *self.reached)
        self.inputs = [*inputs, *self.reached]
        output = next(node for node in self.module.graph.nodes if node.op == "output")
        self.outputs: list[Any] = list(output.args[0])
        output.args = ([value for value in self.outputs if isinstance(value, fx.Node)],)
        self.module.recompile()

    def key(self) -> str:
        """Return a name for the code that belongs to this graph on this machine."""
        layout = [(tuple(x.shape), x.stride(), str(x.dtype), str(x.device)) for x in self.inputs]
        constants = [(name, repr(value.tolist())) for name, value in self.module.named_buffers()]
        about = (CODE_FORMAT, OPTIONS, torch.get_num_threads(), *_machine(), layout, constants, self.module.code)
        return hashlib.sha256(repr(about).encode()).hexdigest()

    def call(self, run: Callable[[list[Tensor]], list[Tensor]]) -> Callable[..., Any]:
        """Return the function, made of its compiled graph."""
        reached, outputs, out_spec = self.reached, self.outputs, self.out_spec
        is_found = [isinstance(value, fx.Node) for value in outputs]

        def compiled(*arguments: Any) -> Any:
            inputs: list[Tensor] = []
            for argument in arguments:  # pytree alone would take longer than many a function
                if type(argument) is dict and all(type(value) is Tensor for value in argument.values()):
                    inputs.extend(argument.values())
                else:
                    inputs.extend(leaf for leaf in pytree.tree_leaves(argument) if isinstance(leaf, Tensor))
            found = run(inputs + reached)
            if not found:
                return nothing
            remaining = iter(found)
            values = [next(remaining) if wanted else value for value, wanted in zip(outputs, is_found, strict=True)]
            return pytree.tree_unflatten(values, out_spec)

        nothing = None if any(is_found) else pytree.tree_unflatten(outputs, out_spec)
        return compiled


class _StandIns(TorchDispatchMode):
    """Lets operations meet stand-ins in place of the tensors that a function reaches besides its arguments.

    Tensors that share memory become views of one stand-in: a change of one is then seen in the others.

    Args:
        make: called once for each piece of memory, in the order in which they are reached.
    """

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.make = make
        self.wholes: list[Tensor] = []
        self.of: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.lift_fresh.default:  # of a new tensor with constant values
            return func(*args)
        args, kwargs = pytree.tree_map_only(Tensor, self.stand_in, (args, kwargs or {}))
        return func(*args, **kwargs)

    def stand_in(self, tensor: Tensor) -> Tensor:
        """Return what takes the place of a tensor."""
        if isinstance(tensor, FakeTensor):
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata not in self.of:
            is_whole = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == storage.nbytes()
            with _disable_current_modes():
                whole = tensor.detach() if is_whole else tensor.detach().new_empty(0).set_(storage)
            self.wholes.append(whole)
            self.of[storage._cdata] = (whole, self.make(whole))
        whole, fake = self.of[storage._cdata]
        if tensor.dtype != whole.dtype:
            raise NotImplementedError(f"Tensors of {tensor.dtype} and {whole.dtype} share memory.")
        if tensor.shape == whole.shape and tensor.stride() == whole.stride():
            return fake
        return torch.as_strided(fake, tensor.shape, tensor.stride(), tensor.storage_offset())


def _machine() -> tuple[str, ...]:
    """Return what machine code depends on besides its source."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    processor = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    versions = (torch.__version__, str(torch.version.git_version), sys.version, platform.platform())
    return (*versions, torch.backends.cpu.get_cpu_capability(), platform.processor(), *processor)


def cache_dir() -> Path | None:
    """Return the directory of compiled code, which nobody but this user can write to; None where there is none."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    directory = Path(root) / "apexrl" / "compiled"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = directory.stat()
    except (OSError, RuntimeError):
        return None
    is_own = not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
    return directory if is_own and os.access(directory, os.W_OK) else None


def compile_function(function: Callable[..., Any], arguments: Sequence[Any]) -> Callable[..., Any]:
    """Return a function (see ``Traced``) as machine code: from the cache, or built now and put there.

    Later arguments must have the same layout, which is not checked. Where it cannot be traced or compiled, it raises
    exceptions of many kinds.
    """
    traced = Traced(function, arguments)
    directory = cache_dir()
    if directory is None:
        with tempfile.TemporaryDirectory() as scratch:
            return traced.call(_load(_build(traced, Path(scratch))))
    path = directory / f"{traced.key()}.pt2"
    with contextlib.suppress(Exception):  # of an entry that is missing or broken: it is built again
        if zipfile.ZipFile(path).testzip() is None:
            return traced.call(_load(path))
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        # Renamed when complete, and loaded from there: a warm run must run what a cold one ran.
        _build(traced, Path(scratch)).replace(path)
    return traced.call(_load(path))


def _build(traced: Traced, directory: Path) -> Path:
    import torch._inductor
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.package.package import package_aoti

    get_cpp_compiler()  # one exception where there is none; the steps below would log what they were doing
    # Laid out in memory as the inputs are: a clone of a slice would not be, and the code would read other elements.
    examples = tuple(clone_preserve_strides(x.detach()) for x in traced.inputs)
    with warnings.catch_warnings(), _quick_compiler(directory):
        warnings.simplefilter("ignore")
        files: Any = torch._inductor.aot_compile(traced.module, examples, options=OPTIONS)
        package_aoti(str(directory / "code.pt2"), files)
    return directory / "code.pt2"


@contextlib.contextmanager
def _quick_compiler(directory: Path) -> Iterator[None]:
    """Let PyTorch compile its two source files at once, and believe what the processor says of its instructions."""
    from unittest.mock import patch

    from torch._inductor import cpp_builder, cpu_vec_isa

    compile_one, started = cpp_builder._run_compile_cmd, list[Future[None]]()

    def compile_aside(command: str, cwd: str) -> None:
        if " -c " in command and ".cpp " in command:  # whose working directory is gone before the compiler ends
            more = "" if "clang" in command.partition(" ")[0] else QUICK_GXX
            started.append(pool.submit(compile_one, command.replace(" -g1 ", " ") + more, str(directory)))
            return
        if " -c " not in command:  # linking
            for running in started:
                running.result()
        compile_one(command, cwd)

    with (
        ThreadPoolExecutor() as pool,
        patch.object(cpp_builder, "_run_compile_cmd", compile_aside),
        patch.object(cpu_vec_isa.VecISA, "check_build", lambda *_: True),
    ):
        yield


def _load(path: Path) -> Callable[[list[Tensor]], list[Tensor]]:
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)
    run: Callable[[list[Tensor]], list[Tensor]] = loader.boxed_run
    return run
