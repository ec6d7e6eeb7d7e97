"Made layer failures: every fault is named with its first module, healthy runs silent, leads are measured."

import pytest

from stabilitylab.cases.layers import LAYER_CASES, score_layer_cases


@pytest.mark.slow  # a model of every fault is trained
def test_every_fault_is_named_and_nothing_else(tmp_path):
    table = score_layer_cases(tmp_path)
    print(table.to_string())
    faults = table[table.kind != ""]
    assert len(table) == len(LAYER_CASES) and faults.found.all() and faults.right_module.all(), table
    assert not table.false.any(), table
    late = (faults.found_onset - faults.onset).dropna()
    assert (late >= 0).all() and late[
        ["MLP blown up", "MLP grows", "queries grow", "values grow"]
    ].max() <= 15, table
    leaves = table.loc[["learning rate ramps", "head grows", "last norm grows"]]
    assert (leaves.lead_activation > 0).all() and (leaves.lead_grad_norm > 0).all(), table
