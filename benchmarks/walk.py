"""What a reader of one training iteration walks through.

    python benchmarks/walk.py [lift_ppo] [--files] [--tree] [--figure PNG]

Traces one iteration of a preset with its log and its checkpoint, on the CPU and eagerly, from the ``pre_iteration``
event of the second iteration to that of the third. Prints how many files of the package it touches, how many functions
it enters, their length in lines (docstrings and nested functions included, every line once), and how many frames lie
between an algorithm's ``update`` and the surrogate, both included. Only functions of the package count; lambdas and
comprehensions belong to the function around them. The first column leaves out what the environment does in a step
(``envs/``), which differs between tasks. ``--files`` lists the files, ``--tree`` the calls. ``--figure`` draws
them; the width of a function is its share of the time (the trace slows small functions down more than large ones).

Before the training path was rebuilt (e927026): 29 files, 151 functions, 1,379 lines, 11 frames. Now: 19 files, 90
functions, 994 lines, 6 frames. A test holds it to 20, 90, 1,000 and 6.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import apexrl
from apexrl.run import directory as run
from apexrl.run.loading import load_config

PACKAGE = str(Path(apexrl.__file__).parent) + "/"
ENVS = "envs/"
FIRST, LAST = "update", "clipped_surrogate"
_HIDDEN = ("<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>")
_OVERRIDES = {
    "training.device": "cpu",
    "features.compile": "false",
    "training.save_interval": "1",
    "training.num_train_steps": "3",
}
_OVERRIDES |= {"training.eval_interval": "0", "training.final_eval_episodes": "0"}

Functions = Mapping[str, Mapping[CodeType, range]]
"""Lines of every function that was entered, by file."""


@dataclass
class Call:
    """A function of the package, and what it called."""

    code: CodeType
    calls: list[Call] = field(default_factory=list)
    seconds: float = 0.0
    times: int = 1

    @property
    def name(self) -> str:
        return self.code.co_qualname.replace("<locals>.", "")

    @property
    def file(self) -> str:
        return self.code.co_filename.removeprefix(PACKAGE)

    def walk(self) -> Iterator[Call]:
        yield self
        for call in self.calls:
            yield from call.walk()


class Tracer:
    """Keeps the tree of the package's calls between ``start`` and ``stop``, in this thread.

    Attributes:
        root: the function that runs all the while.
    """

    def __init__(self, root: CodeType) -> None:
        self.root = Call(root)
        self._stack: list[tuple[FrameType | None, Call]] = [(None, self.root)]

    def start(self) -> None:
        self.root.seconds = -time.perf_counter()
        sys.setprofile(self._note)

    def stop(self) -> None:
        sys.setprofile(None)
        if self.root.seconds < 0:
            self.root.seconds += time.perf_counter()

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_name in _HIDDEN:
            return
        if event == "call":
            call = Call(code, seconds=-time.perf_counter())
            self._stack[-1][1].calls.append(call)
            self._stack.append((frame, call))
        elif event == "return" and self._stack[-1][0] is frame:
            self._stack.pop()[1].seconds += time.perf_counter()


def trace_iteration(preset: str) -> Call:
    """Trace the second iteration of a preset, and the checkpoint after it."""
    config = load_config(preset, list(_OVERRIDES.items()))
    with tempfile.TemporaryDirectory() as directory:
        trainer = run.start(config, Path(directory), [])
        tracer = Tracer(type(trainer).learn.__code__)

        def step(_: Any) -> None:
            {1: tracer.start, 2: tracer.stop}.get(trainer.counters.iteration, lambda: None)()

        trainer.add_callback("pre_iteration", step)
        try:
            trainer.learn()
        finally:
            tracer.stop()
            trainer.close()
    return tracer.root


@cache
def _ends(path: str) -> dict[int, int]:
    """Return the last line of every function of a file, by the first."""
    found = {}
    for node in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(node, ast.FunctionDef):
            found[min([node.lineno, *(one.lineno for one in node.decorator_list)])] = node.end_lineno or node.lineno
    return found


def functions(root: Call) -> Functions:
    """Return the functions that were entered."""
    found: dict[str, dict[CodeType, range]] = {}
    for call in root.walk():
        first = call.code.co_firstlineno
        found.setdefault(call.file, {})[call.code] = range(first, _ends(call.code.co_filename)[first] + 1)
    return found


def counts(entered: Functions) -> dict[str, int]:
    """Return how many files, functions and lines there are."""
    lines = {(file, line) for file, codes in entered.items() for span in codes.values() for line in span}
    return {"files": len(entered), "functions": sum(map(len, entered.values())), "lines": len(lines)}


def frames_between(root: Call, first: str, last: str) -> list[str]:
    """Return the names of the frames from a function ``first`` down to the first call of ``last`` below it."""

    def search(call: Call, path: list[Call]) -> list[Call]:
        path = [*path, call]
        if call.code.co_name == last:
            return path
        return next((found for inner in call.calls if (found := search(inner, path))), [])

    path = search(root, [])
    starts = [index for index, call in enumerate(path) if call.code.co_name == first]
    return [call.name for call in path[starts[0] :]] if starts else []


def tree_lines(root: Call, indent: int = 0) -> Iterator[str]:
    """Yield the calls as text; calls of one function in a row become one line, with what any of them called."""
    groups: list[list[Call]] = []
    for call in root.calls:
        if groups and groups[-1][0].code is call.code:
            groups[-1].append(call)
        else:
            groups.append([call])
    seen: set[tuple[str, ...]] = set()
    for group in groups:
        richest = max(group, key=lambda call: sum(1 for _ in call.walk()))
        times = f" × {len(group)}" if len(group) > 1 else ""
        below = list(tree_lines(richest, indent + 1))
        if (key := (richest.name, *below)) not in seen:
            yield f"{'  ' * indent}{richest.name}{times}  {richest.file}"
            yield from below
        seen.add(key)


def merged(calls: Sequence[Call]) -> list[Call]:
    """Return one call for each function, in the order of their first calls, with the time of all of them."""
    groups: dict[CodeType, list[Call]] = {}
    for call in calls:
        groups.setdefault(call.code, []).append(call)
    return [
        Call(
            code,
            merged([inner for call in group for inner in call.calls]),
            sum(max(0.0, call.seconds) for call in group),  # the last one has not returned
            sum(call.times for call in group),
        )
        for code, group in groups.items()
    ]


def draw(root: Call, path: Path, depth: int = 9) -> None:
    """Draw the calls from top to bottom, each below its caller."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    _, axes = pyplot.subplots(figsize=(15, 6), dpi=100)
    packages: dict[str, Any] = {}

    def box(call: Call, left: float, level: int) -> None:
        width = call.seconds / root.seconds
        package = call.file.partition("/")[0].removesuffix(".py")
        color = packages.setdefault(package, pyplot.get_cmap("Pastel1")(len(packages) % 9))
        axes.barh(-level, width, left=left, height=0.94, color=color, edgecolor="white", linewidth=0.8)
        if width > 0.03:
            times = f" × {call.times}" if call.times > 1 else ""
            name = call.name.replace(".", ".\n") + times
            text = axes.text(left + 0.002, -level, name, va="center", fontsize=7, clip_on=True)
            text.set_clip_path(axes.patches[-1])
        if level < depth:
            for inner in merged(call.calls):
                box(inner, left, level + 1)
                left += inner.seconds / root.seconds

    box(root, 0.0, 0)
    for package, color in packages.items():
        axes.barh(0, 0, color=color, label=package)
    axes.legend(ncols=len(packages), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8)
    axes.set(xlim=(0, 1), ylim=(-depth - 0.5, 0.5))
    axes.axis("off")
    pyplot.savefig(path, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("preset", nargs="?", default="lift_ppo")
    parser.add_argument("--files", action="store_true", help="list the files")
    parser.add_argument("--tree", action="store_true", help="print the calls")
    parser.add_argument("--figure", type=Path, help="draw the calls, as PNG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    root = trace_iteration(options.preset)
    entered = functions(root)
    path = {file: codes for file, codes in entered.items() if not file.startswith(ENVS)}
    if options.figure:
        draw(root, options.figure)
    if options.tree:
        print(root.name, *tree_lines(root, 1), sep="\n", end="\n\n")
    if options.files:
        by_file = {file: counts({file: codes}) for file, codes in entered.items()}
        for file, found in sorted(by_file.items(), key=lambda entry: -entry[1]["lines"]):
            print(f"{found['functions']:4} functions {found['lines']:5} lines  {file}")
        print()
    print(f"{'':10}{'':>8}  with {ENVS}")
    for name, count in counts(path).items():
        print(f"{name:10}{count:8,}{counts(entered)[name]:10,}")
    frames = frames_between(root, FIRST, LAST)
    print(f"{'frames':10}{len(frames):8,}  {' → '.join(frames)}")


if __name__ == "__main__":
    main()
