"""Numbers of several processes together, and how long phases take."""

from __future__ import annotations

import math
import time

import pytest
import torch

from apexrl.agent.training_log import Stopwatch, merged_to_host
from apexrl.core.system import distributed

NAN = math.nan


def test_an_event_that_one_process_knows_counts_in_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # Here 1 of 2 episodes succeeded. Of the others, one process has heard of no success in its 4 episodes, and one
    # does not know the metric at all and ended 2: 1 of 8.
    others = [
        ({"rollout/success_rate": NAN, "rollout/success_rate weight": 0.0, "rollout/episode_len weight": 4.0}, ["x"]),
        ({"rollout/episode_len": 5.0, "rollout/episode_len weight": 2.0}, []),
    ]
    others[0][0].update({"x": NAN, "rollout/episode_len": 2.0})
    monkeypatch.setattr(distributed, "all_gather_object", lambda own: [own, *others])
    host = merged_to_host(
        {"rollout/episode_len": torch.tensor(3.0), "rollout/success_rate": torch.tensor(0.5)},
        {"rollout/episode_len": 2.0, "rollout/success_rate": 2.0},
        ["rollout/success_rate"],
    )
    assert host["rollout/success_rate"] == pytest.approx(1 / 8)
    assert host["rollout/episode_len"] == pytest.approx((2 * 3 + 4 * 2 + 2 * 5) / 8)
    assert math.isnan(host["x"]), "nobody has heard of it"


def test_stopwatch_times_the_phase_between_two_marks() -> None:
    watch = Stopwatch(torch.device("cpu"))
    watch.mark("sleep")
    time.sleep(0.05)
    watch.mark("end")
    seconds = watch.seconds()
    assert list(seconds) == ["sleep"]
    assert 0.045 < seconds["sleep"] < 0.5
