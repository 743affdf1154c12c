"""``benchmarks/walk.py`` on a call of a few functions."""

from __future__ import annotations

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
