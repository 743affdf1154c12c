"""Rules of the repository that no single module owns."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import apexrl

PACKAGE = Path(apexrl.__file__).parent
TESTS = Path(__file__).parents[1]
MODULE_STRING = re.compile(r"^apexrl(\.\w+)+:\w+|^apexrl\.\w+(\.\w+)+$")
"""A string that names something in a module, as ``monkeypatch.setattr`` takes it, or a module."""


def ties_to_the_layout() -> Counter[str]:
    """Count, for each test file, private names of the package and strings with its module paths."""
    found: Counter[str] = Counter()
    for path in TESTS.rglob("*.py"):
        tree = ast.parse(path.read_text())
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        own |= {
            node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                name, owner = node.attr, getattr(node.value, "id", "")
                counts = name.startswith("_") and not name.startswith("__") and name not in own
                counts = counts and owner not in ("self", "cls", "sys", "os", "torch", "np")
            elif isinstance(node, ast.ImportFrom):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                counts = (node.module or "").startswith("apexrl") and bool(private)
            else:
                counts = isinstance(node, ast.Constant) and bool(MODULE_STRING.match(str(node.value)))
            found[str(path.relative_to(TESTS))] += counts
    return +found


def test_every_public_name_is_importable_from_the_package() -> None:
    missing = [name for name in apexrl.__all__ if not hasattr(apexrl, name)]
    assert missing == []


def test_the_two_lists_of_public_names_agree() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    for_checkers = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert for_checkers == set(apexrl.__all__) - {"__version__"}


def test_the_help_does_not_wait_for_pytorch() -> None:
    code = (
        "import contextlib, sys, apexrl.cli\n"
        "with contextlib.suppress(SystemExit):\n    apexrl.cli.main(['--help'])\n"
        "print('torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "False"


def test_training_needs_none_of_the_extras() -> None:
    extras = ("mujoco", "pygame", "gymnasium_robotics", "metaworld", "h5py", "wandb", "ray", "onnx", "plotly", "optuna")
    code = f"import sys\nsys.modules.update(dict.fromkeys({extras}))\nimport apexrl.run.directory"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_has_twelve_entries_and_as_many_layers_as_packages_stand_above_each_other() -> None:
    entries = {path.stem for path in PACKAGE.iterdir()} - {"__init__", "__pycache__", "py"}
    assert len(entries) <= 12, sorted(entries)
    contract = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][
        0
    ]
    assert {name.removeprefix("apexrl.") for line in contract["layers"] for name in line.split(" | ")} == entries


def test_workers_start_without_pytorch() -> None:
    code = (
        "import sys, apexrl.envs.workers, apexrl.envs.workers.gym_group, apexrl.envs.workers.suite_group\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


ONE_PER_TASK = {"CAMERAS", "DT", "FORCE", "FRAME", "FRAME_PARTS", "GRAVITY", "MAX_SPEED", "RANGES", "X_LIMIT"}
ONE_PER_COMMAND, TYPE_VARIABLES = {"register"}, {"T"}


def test_a_public_name_of_a_module_has_one_meaning() -> None:
    homes: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)]
            for name in names:
                homes.setdefault(name, set()).add(str(path.relative_to(PACKAGE)))
    several = {name for name, paths in homes.items() if len(paths) > 1 and not name.startswith("_")}
    assert several - ONE_PER_TASK - ONE_PER_COMMAND - TYPE_VARIABLES == set()


def test_tests_survive_a_move() -> None:
    assert ties_to_the_layout().total() <= 40, ties_to_the_layout()
    wordings = sum(path.read_text().count("match=") for path in TESTS.rglob("*.py") if path != Path(__file__))
    assert wordings <= 60
