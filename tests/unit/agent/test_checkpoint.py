"""Checkpoints: written whole or not at all, read without running anything, refused with a reason."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.refusals import refused
from torch import nn

from apexrl.agent import checkpoint
from apexrl.core.errors import CheckpointError, RunDirError


def content(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {key: {} for key in checkpoint.KEYS}
    return {**values, "iteration": 3, "total_steps": 30, "num_evaluations": 0, "optimizer_steps": 4, **changes}


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    values = content(policy={"w": torch.arange(3.0)}, config={"task": {"id": "lift", "x": [1, 2.5, None, True, "a"]}})
    checkpoint.save(tmp_path / "new" / "a.pt", values)
    loaded = checkpoint.load(tmp_path / "new" / "a.pt")
    assert loaded.pop("format") == checkpoint.CHECKPOINT_FORMAT
    torch.testing.assert_close(loaded.pop("policy"), values.pop("policy"), rtol=0, atol=0)
    assert loaded == values
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.pt"]


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.pt"
    checkpoint.save(path, content())
    before = path.read_bytes()

    def half_a_save(_: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", half_a_save)
    with refused(RunDirError, path, "No space left on device"):
        checkpoint.save(path, content(iteration=4))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(number: int) -> None:
        calls.append("fsync")
        fsync(number)

    def noted_replace(path: Path, target: Path) -> Path:
        calls.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    checkpoint.save(tmp_path / "a.pt", content())
    assert calls == ["fsync", "rename", "fsync"]  # the file, then its directory entry


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with refused(CheckpointError, tmp_path / "a.pt"):
        checkpoint.load(tmp_path / "a.pt")


@pytest.mark.parametrize("stored", [{"iteration": 1}, [1, 2], {"format": "new"}])
def test_other_files_of_pytorch_are_refused(stored: Any, tmp_path: Path) -> None:
    torch.save(stored, tmp_path / "a.pt")
    with refused(CheckpointError, tmp_path / "a.pt", "not written by apexrl"):
        checkpoint.load(tmp_path / "a.pt")


def test_a_checkpoint_that_lacks_something_says_what(tmp_path: Path) -> None:
    values = content()
    del values["rng"], values["env"]
    checkpoint.save(tmp_path / "a.pt", values)
    with refused(CheckpointError, tmp_path / "a.pt", "env", "rng"):
        checkpoint.load(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("part", "value"),
    [("policy", None), ("algorithm", 3), ("rng", []), ("collector", None), ("env", "x"), ("config", [1]),
     ("iteration", "x"), ("iteration", -1), ("total_steps", None), ("num_evaluations", True)],
)  # fmt: skip
def test_a_part_of_another_kind_is_named_with_the_file(part: str, value: Any, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a.pt", content(**{part: value}))
    with refused(CheckpointError, tmp_path / "a.pt", part, repr(value)):
        checkpoint.load(tmp_path / "a.pt")


def test_a_changed_bit_is_found_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    checkpoint.save(path, content(policy={"w": torch.randn(400)}))
    intact, before = path.read_bytes(), checkpoint.load(path)
    weights = before["policy"].pop("w")
    start = intact.index(weights.numpy().tobytes())
    anywhere = random.Random(0).sample(range(8 * len(intact)), 200)
    in_weights = random.Random(1).sample(range(8 * start, 8 * (start + weights.nbytes)), 50)
    for place in anywhere + in_weights:
        changed = bytearray(intact)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            loaded = checkpoint.load(path)
        except checkpoint.DamagedCheckpointError:
            continue
        assert place not in in_weights
        assert torch.equal(loaded["policy"].pop("w"), weights)
        assert loaded == before


@pytest.mark.parametrize("size", [0, 1, 21, 22, 500, -300, -22, -1])
def test_a_truncated_file_is_found(size: int, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    checkpoint.save(path, content(policy={"w": torch.randn(400)}))
    path.write_bytes(path.read_bytes()[:size])
    with refused(checkpoint.DamagedCheckpointError, path):
        checkpoint.load(path)


def test_the_newest_that_can_be_read_is_used_and_the_others_are_named(tmp_path: Path) -> None:
    for number in range(1, 5):
        checkpoint.save(tmp_path / checkpoint.checkpoint_name(number), content(iteration=number))
    for number in (3, 4):
        (tmp_path / checkpoint.checkpoint_name(number)).write_bytes(b"PK")
    path, loaded, problems = checkpoint.load_newest(tmp_path, checkpoint.load)
    assert (path.name, loaded["iteration"]) == (checkpoint.checkpoint_name(2), 2)
    assert all(checkpoint.checkpoint_name(number) in text for number, text in zip((4, 3), problems, strict=True))
    for number in (1, 2):
        (tmp_path / checkpoint.checkpoint_name(number)).write_bytes(b"PK")
    with refused(CheckpointError, tmp_path, *(checkpoint.checkpoint_name(number) for number in range(1, 5))):
        checkpoint.load_newest(tmp_path, checkpoint.load)


def test_the_only_checkpoint_is_said_to_be_the_only_one(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "checkpoints"
    directory.mkdir(parents=True)
    only, other, own = (directory / name for name in ("iteration_000002.pt", "iteration_000001.pt", "mine.pt"))
    for path in (only, own):
        path.write_bytes(b"PK")
    with refused(CheckpointError, only, directory, "apexrl train PRESET --run-dir NEW_DIR"):
        checkpoint.load_newest(directory, checkpoint.load)
    (tmp_path / "run" / "config.yaml").touch()
    with refused(CheckpointError, only, directory, f"apexrl train {tmp_path}/run/config.yaml --run-dir NEW_DIR"):
        checkpoint.load(only)
    with refused(CheckpointError, own, only):
        checkpoint.load(own)
    other.write_bytes(b"PK")
    with refused(CheckpointError, only, other):
        checkpoint.load(only)


def test_numbered_checkpoints_are_ordered_by_number(tmp_path: Path) -> None:
    names = [
        "iteration_000010.pt",
        "iteration_000009.pt",
        "iteration_1000000.pt",
        "best.pt",
        "iteration_12.pt",
        ".iteration_000011.pt.part",
    ]
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in checkpoint.numbered(tmp_path)] == [names[1], names[0], names[2]]
    assert [path.name for path in checkpoint.numbered(tmp_path, 10)] == [names[1], names[0]]
    assert checkpoint.latest(tmp_path).name == names[2]
    assert checkpoint.checkpoint_name(1_000_000) == names[2]


def test_a_directory_without_checkpoints_is_named(tmp_path: Path) -> None:
    with refused(CheckpointError, tmp_path / "none", "not a run directory"):
        checkpoint.latest(tmp_path / "none")
    (tmp_path / "policy.json").touch()
    with refused(CheckpointError, tmp_path, "load_policy"):
        checkpoint.latest(tmp_path)
    (tmp_path / "config.yaml").touch()
    for directory in (tmp_path, tmp_path / "checkpoints"):
        with refused(CheckpointError, directory, "no checkpoint"):
            checkpoint.latest(directory)


def test_weights_that_do_not_fit_are_named_and_change_nothing() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state: dict[str, Any] = {name: torch.ones_like(value) for name, value in before.items()}
    state["0.weight"] = torch.ones(4, 2)
    state["2.bias"] = state.pop("1.bias")
    with refused(CheckpointError, "a.pt", "1.bias", "2.bias", "0.weight", "[4, 2]", "[3, 2]"):
        checkpoint.load_module(module, state, Path("a.pt"))
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_weights_that_are_no_tensors_are_named() -> None:
    with refused(CheckpointError, "a.pt", "weight"):
        checkpoint.load_module(nn.Linear(2, 3), {"weight": "evil", "bias": torch.zeros(3)}, Path("a.pt"))


def test_weights_that_fit_are_loaded() -> None:
    module = nn.Linear(2, 3)
    checkpoint.load_module(module, {"weight": torch.ones(3, 2), "bias": torch.full((3,), 2.0)}, Path("a.pt"))
    assert module(torch.ones(2)).tolist() == [4.0, 4.0, 4.0]


def _draw() -> tuple[float, float, float, float]:
    return float(torch.randn(())), random.gauss(0, 1), float(np.random.randn()), random.random()


def test_random_generators_continue_where_they_were(tmp_path: Path) -> None:
    _draw()  # leaves a cached normal number in the generators of Python and NumPy
    checkpoint.save(tmp_path / "a.pt", content(rng=checkpoint.rng_state()))
    expected = [_draw(), _draw()]
    checkpoint.set_rng_state(checkpoint.load(tmp_path / "a.pt")["rng"])
    assert [_draw(), _draw()] == expected


def test_random_generators_are_put_back_after_a_block_also_after_an_exception() -> None:
    state = checkpoint.rng_state()
    expected = _draw()
    checkpoint.set_rng_state(state)

    def interrupted() -> None:
        with checkpoint.kept_rng_state():
            _draw()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        interrupted()
    assert _draw() == expected
