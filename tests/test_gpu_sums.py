"The kernels of a GPU in Triton's interpreter beside the sums of the CPU; `make gpu` runs them on a device."

import os
import subprocess
import sys

import pytest

PROGRAM = """
import numpy as np
import torch
from stabilitylab.probe import gpu_sums, stats

torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    for n in (0, 1, 17, 4096, 530_000)[: 5 if dtype == torch.float32 else 4]:
        x = (torch.randn(n, dtype=torch.float64) * 3).to(dtype)
        if n > 9:
            x[[2, 5, 7]] = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=dtype)
        pieces = torch.empty(gpu_sums.PIECES, 5, dtype=torch.float64)
        plain = torch.zeros(5, dtype=torch.float64)
        gpu_sums.sums_in_pieces(x, pieces)
        stats._add_torch(x, plain)
        assert torch.allclose(stats.join_pieces(pieces), plain, rtol=1e-9, atol=1e-9), (dtype, n)
rule = stats.AdamRule(3, 0.01, (0.9, 0.99), 1e-3, 0.1)
for n in (1, 70_001):
    g, w, m, v, top = torch.randn(5, n)
    g, v, top = g * 1e-3, v.square() * 1e-6, v.square()
    if n > 9:
        g[3], w[4], m[5], v[6] = float("nan"), float("inf"), float("nan"), float("inf")
    first, second, shrink = rule.factors()
    numbers = (first, second, rule.lr, rule.eps, shrink)
    got = stats.join_pieces(gpu_sums.adam_sums_in_pieces((g, w, m, v, top), numbers))
    assert torch.allclose(got, stats._adam_torch(g, w, m, v, top, rule), rtol=1e-5, atol=1e-9), got
print("equal")
"""


@pytest.mark.slow
def test_the_kernels_are_the_sums_of_the_cpu():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr
