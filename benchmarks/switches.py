"""How many checks of ``src/apexrl`` know a concrete class of the package.

    python benchmarks/switches.py [--list]

Counts every ``isinstance`` and ``issubclass`` call, every comparison of ``type(x)`` or ``x.__class__`` and every class
pattern of a ``match`` that names a class of one of the ``FAMILIES``: configurations (``*Config``), environments and
suites, policies, collectors and what steps a suite, algorithms. A family's base class counts as well, even where it
checks what a user passed. A check that names several classes counts once; so does an ``assert`` for the type checker.
Classes are found by name, without importing the package. e927026 had 69.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "apexrl"
FAMILIES = ("VecEnv", "TaskSuite", "Policy", "BaseCollector", "SuiteRunner", "BaseAlgorithm")


def family_classes(trees: Iterable[ast.Module]) -> set[str]:
    """Return the names of the classes that should not be asked for."""
    bases = {
        node.name: {name for base in node.bases for name in _names(base)}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {name for name in bases if name in FAMILIES or name.endswith("Config")}
    while more := {name for name, parents in bases.items() if parents & found} - found:
        found |= more
    return found


def switches(tree: ast.Module, classes: set[str]) -> list[tuple[int, str]]:
    """Return line and text of every check in a module that names one of the classes."""
    found = [(line, text) for node in ast.walk(tree) for line, text, names in _checks(node) if names & classes]
    return sorted(found)


def _checks(node: ast.AST) -> Iterator[tuple[int, str, set[str]]]:
    """Yield line, text and the names of the classes, where this node is a check."""
    if isinstance(node, ast.Call) and _names(node.func) & {"isinstance", "issubclass"}:
        yield node.lineno, ast.unparse(node), _names(node.args[1])
    elif isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        if any(_is_class_of(side) for side in sides):
            yield node.lineno, ast.unparse(node), {name for side in sides for name in _names(side)}
    elif isinstance(node, ast.MatchClass):
        yield node.cls.lineno, ast.unparse(node), _names(node.cls)


def _is_class_of(node: ast.expr) -> bool:
    is_call = isinstance(node, ast.Call) and _names(node.func) == {"type"} and len(node.args) == 1
    return is_call or (isinstance(node, ast.Attribute) and node.attr == "__class__")


def _names(node: ast.AST) -> set[str]:
    """Return the names in an expression; of a path such as ``envs.VecEnv`` the parts."""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return names | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print every check")
    listed = parser.parse_args().list
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    classes = family_classes(trees.values())
    counts: Counter[str] = Counter()
    for path, tree in trees.items():
        place = str(path.relative_to(PACKAGE))
        for line, text in switches(tree, classes):
            counts[place] += 1
            if listed:
                print(f"{place}:{line}: {text}")
    for place, count in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])):
        print(f"{count:5}  {place}")
    print(f"{sum(counts.values()):5}  in all")


if __name__ == "__main__":
    main()
