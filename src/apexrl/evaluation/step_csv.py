"""Step tables: one row per step, one file per environment."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import torch
from tensordict import TensorDict

from apexrl.core.result import StepRows
from apexrl.core.types import DONE, INFO, METRIC, REWARD


def extend_rows(rows: StepRows, batch: TensorDict) -> None:
    """Append one row per step and environment, bringing the whole batch, with its control data, to the host at once.

    ``done`` is 1 at the last step of an episode.
    """
    columns = {"reward": batch[REWARD], DONE: batch[DONE]}
    for group in (METRIC, INFO):
        columns |= dict(batch[group].items()) if group in batch else {}
    table = torch.stack([column.squeeze(-1).double() for column in columns.values()]).cpu().numpy()
    for index, env_rows in rows.items():
        start = len(env_rows)
        for t in range(table.shape[1]):
            values = dict(zip(columns, table[:, t, index].tolist(), strict=True))
            env_rows.append({"step": start + t, "success": math.nan, "fail": math.nan, **values})


def save_step_csvs(step_data_per_env: StepRows, directory: Path) -> list[Path]:
    """Write ``env<M>/rewards.csv`` below ``directory``: one row per step; a value that is missing stays empty."""
    paths = []
    for index, rows in step_data_per_env.items():
        path = directory / f"env{index}" / "rewards.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        names = dict.fromkeys(["step", "reward", DONE, "success", "fail", *(name for row in rows for name in row)])
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(names))
            writer.writeheader()
            for row in rows:
                writer.writerow({name: "" if math.isnan(value) else value for name, value in row.items()})
        paths.append(path)
    return paths
