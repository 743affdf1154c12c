"""The comparison of two commits sees what it is for."""

from pathlib import Path

import pytest
import torch

from tests.parity import run


def test_one_bit_of_a_tensor_and_the_last_digit_of_a_metric_count() -> None:
    x = torch.ones(3)
    y = x.clone()
    y.view(torch.int32)[1] ^= 1
    assert run.differences({"a": run.digest(x)}, {"a": run.digest(x.clone())}) == []
    assert run.differences({"a": run.digest(x), "b": "1.0"}, {"a": run.digest(y), "b": "1.0"}) == ["a"]
    assert run.differences({"a": "1"}, {"b": "1"}) == ["a", "b"]


def test_times_and_configurations_are_left_out_and_weights_are_not() -> None:
    for path in ("metrics/0/time/fps", "metrics/1/collect/steps_per_second", "checkpoint/config/task/id"):
        assert run.LEFT_OUT.search(path), path
    for path in (
        "metrics/0/train/loss",
        "checkpoint/policy/actor.0.weight",
        "checkpoint/algorithm/optimizer/state/mean",
    ):
        assert not run.LEFT_OUT.search(path), path


def test_base_is_compared_under_the_names_and_in_the_units_of_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "RENAMES", ((r"/lam$", "/gae_lambda"),))
    monkeypatch.setattr(run, "FACTORS", ((r"/loss$", 2.0, "old.py", "0.5 *"),))
    file = tmp_path / "apexrl" / "old.py"
    file.parent.mkdir()
    before = {"checkpoint/algorithm/lam": "0.95", "metrics/0/train/lambda": "1", "metrics/0/loss": "0.3"}
    for text, loss in (("0.5 * x", "0.6"), ("x", "0.3")):
        file.write_text(text)
        after = {"checkpoint/algorithm/gae_lambda": "0.95", "metrics/0/train/lambda": "1", "metrics/0/loss": loss}
        assert run.translated(before, tmp_path) == after
