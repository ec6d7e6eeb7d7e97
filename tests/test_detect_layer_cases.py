"Layer failures of known cause: every fault is named with its first module, and healthy runs are silent."

import pandas as pd
import pytest

from stabilitylab.cases.layers import LAYER_CASES
from stabilitylab.cases.registry import score_case


@pytest.mark.slow  # a model of every fault is trained
def test_every_fault_is_named_and_nothing_else():
    scores = {name: score_case(name) for name in LAYER_CASES}
    judged = {case.kind for case in LAYER_CASES.values() if case.kind} | {"update_rms_excess"}
    for name, score in scores.items():
        assert not judged & set(score.false_alarms), score
        assert not score.kind or (score.found and score.module), score
        assert LAYER_CASES[name].module in score.module, score
    late = pd.Series({name: score.off for name, score in scores.items() if score.off is not None})
    assert (late >= 0).all(), late
    assert late[["MLP blown up", "MLP grows", "queries grow", "values grow"]].max() <= 15, late
    for name in ("learning rate ramps", "head grows", "last norm grows"):
        leads = scores[name].leads
        assert leads["activation_explosion"] > 0 and leads["grad_norm_explosion"] > 0, leads
