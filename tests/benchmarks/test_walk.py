"""``benchmarks/walk.py`` on a call of a few functions."""

from __future__ import annotations

import pytest
import torch
import walk

from apexrl.core.functional import objectives


def test_a_trace_holds_the_functions_of_the_package_in_the_order_of_their_calls() -> None:
    tracer = walk.Tracer(objectives.clipped_surrogate.__code__)
    tracer.start()
    objectives.approx_kl(torch.zeros(2))
    tracer.stop()
    objectives.approx_kl(torch.zeros(2))

    assert [call.name for call in tracer.root.walk()] == ["clipped_surrogate", "approx_kl", "probability_ratio"]
    assert walk.counts(walk.functions(tracer.root)).items() >= {"files": 1, "functions": 3}.items()
    assert walk.frames_between(tracer.root, "approx_kl", "probability_ratio") == ["approx_kl", "probability_ratio"]


@pytest.mark.slow
def test_one_iteration_stays_short_enough_to_be_read() -> None:
    root = walk.trace_iteration("lift_ppo")
    entered = walk.functions(root)
    found = walk.counts({file: codes for file, codes in entered.items() if not file.startswith(walk.ENVS)})

    assert found["files"] <= 20
    assert found["functions"] <= 90
    assert found["lines"] <= 1000
    assert len(walk.frames_between(root, walk.FIRST, walk.LAST)) <= 6
