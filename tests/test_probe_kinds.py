"Kinds and layers of modules under the naming of other projects."

from collections import Counter

import pytest
from probe_models import NAMES, tiny

from stabilitylab.probe.kinds import module_kinds, param_kinds

pytest.importorskip("transformers")
SEPARATE = {"attn.q", "attn.k", "attn.v", "attn.out", "mlp.fc1", "mlp.fc2"}
FUSED = {"attn.qkv", "attn.out", "mlp.fc1", "mlp.fc2"}


@pytest.mark.parametrize("name", NAMES)
def test_every_block_has_its_parts_once_a_layer(name):
    model, _ = tiny(name)
    kinds = module_kinds(model)
    stacks = 2 if name in ("t5", "whisper") else 1
    found = Counter(kinds.values())
    for k in FUSED if name in ("gpt2", "bloom") else SEPARATE:
        for layer in (0, 1):
            assert found[k, layer] == stacks, (k, layer)
    if stacks == 2:
        assert all(found[f"cross_attn.{r}", 1] == 1 for r in ("q", "k", "v", "out"))
    kinds_only = {k for k, _ in kinds.values()}
    assert {"norm", "lm_head", "conv" if name in ("vit",) else "embed"} <= kinds_only
    assert set(param_kinds(model)) == {n for n, _ in model.named_parameters()}
