"""Print the oldest versions that pyproject.toml allows, as a requirements file: ``make test-floors`` installs them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

EXTRAS = ("mujoco", "classic", "suites", "report", "sweep", "export", "wandb")
"""What the unit tests use; tests of the other extras skip without them."""
TOOLS = ["pytest", "pytest-xdist", "hypothesis"]
"""What runs the tests; any version will do."""


def floors(requirements: list[str]) -> list[str]:
    """``name>=1.2,<3`` becomes ``name==1.2``."""
    found = [re.match(r"([\w.-]+)>=([\w.]+)", requirement) for requirement in requirements]
    assert all(found), f"every requirement needs a floor: {requirements}"
    return [f"{match[1]}=={match[2]}" for match in found if match]


if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(name for extra in EXTRAS for name in project["optional-dependencies"][extra])]
    print("\n".join(sorted({*floors(wanted), *TOOLS})))
