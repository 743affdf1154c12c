"""The comparison of ``benchmarks/ppo_learning.py``: what it runs, what it repeats, and its figures, by hand."""

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("ppo_learning")


def options(**values: Any) -> argparse.Namespace:
    common = {"only": None, "seeds": [1, 2], "task": ["Hopper-v5"], "set": [], "variant": None, "peer": "preset"}
    return argparse.Namespace(**{**common, "no_compile": True, "steps": 10, "episodes": 2, "commit": "abc", **values})


def finished(job: dict[str, Any], deterministic: float, sampled: float) -> dict[str, Any]:
    return {**job, "return": deterministic, "sampled": sampled, "seconds": 1.0}


def test_jobs_are_every_library_variant_seed_and_task(program: Any) -> None:
    jobs = program.make_jobs(options(set=["algo.clip_coef=0.1"], variant=["plain", "wide policy.hidden_dims=[8]"]))
    found = [(job["library"], job["variant"], job["seed"], job["options"]) for job in jobs]
    wide = {"algo.clip_coef": "0.1", "policy.hidden_dims": "[8]"}
    assert found == [
        *(("stable-baselines3", "", seed, {"algo.clip_coef": "0.1"}) for seed in (1, 2)),
        *(
            ("apexrl", name, seed, chosen)
            for seed in (1, 2)
            for name, chosen in (("plain", {"algo.clip_coef": "0.1"}), ("wide", wide))
        ),
    ]
    assert {job["library"] for job in program.make_jobs(options(only="ours"))} == {"apexrl"}


def test_what_the_file_holds_is_not_run_again(program: Any, tmp_path: Path) -> None:
    jobs = program.make_jobs(options())
    path = tmp_path / "results.jsonl"
    # The last line is what a killed run left of it.
    path.write_text("".join(json.dumps(finished(job, 1.0, 2.0)) + "\n" for job in jobs) + '{"task": "Hop')
    rows = program.run_all(jobs, 1, path)
    assert [row["seed"] for row in rows] == [job["seed"] for job in jobs]
    # Another commit changes ours, not theirs.
    known = {program.key(row) for row in rows}
    other = program.make_jobs(options(commit="def"))
    assert {job["library"] for job in other if program.key(job) not in known} == {"apexrl"}


def test_the_figures_by_hand(program: Any) -> None:
    jobs = program.make_jobs(options())
    # Theirs 1 and 3, ours 2 and 6; the second of theirs earns less than half of what its sampled actions do.
    rows = [finished(job, *numbers) for job, numbers in zip(jobs, [(1, 1), (3, 7), (2, 3), (6, 4)], strict=True)]
    summary = {entry["library"]: entry for entry in program.summarize(rows)}
    assert (summary["apexrl"]["return"], summary["apexrl"]["stuck"]) == (4.0, 0)
    assert (summary["stable-baselines3"]["sampled_median"], summary["stable-baselines3"]["stuck"]) == (4.0, 1)
    assert summary["apexrl"]["return_error"] == pytest.approx(2.0)
    found = program.difference(rows, "Hopper-v5")
    # Welch: variances 2 and 8 over 2 seeds each, standard error √5, 25 / (1 + 16) = 1.47 degrees of freedom.
    assert found["return_difference"] == 2.0
    assert found["return_high"] - 2.0 == pytest.approx(2.0 - found["return_low"])
    assert 12.0 < found["return_high"] < 17.0
    lines = program.table(program.summarize(rows), {"Hopper-v5": found}).splitlines()
    assert lines[-1].startswith("| Hopper-v5 | difference and its 95 % interval | +2 (-")
    assert len({line.count("|") for line in lines}) == 1
