"Arguments of compiled functions: an array lives as long as the call, beside which other threads run."

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import stabilitylab
from stabilitylab.numerics import kernels

_READ = "double first(const double *x, void (*meanwhile)(void)) { meanwhile(); return x[0]; }"


@pytest.mark.parametrize(("make", "dtype"), [(np.array, np.float64), (torch.tensor, torch.float64)])
def test_an_array_made_for_the_call_is_there_until_it_ends(make, dtype):
    library = kernels.compile_c(_READ, "test_first")
    if library is None:
        pytest.skip("no C compiler")
    others, function = [], ctypes.CFUNCTYPE(None)
    meanwhile = function(lambda: others.extend(np.full(5, 7.0) for _ in range(100)))
    library.first.restype = ctypes.c_double
    library.first.argtypes = [kernels._ARGUMENTS["p"], function]
    # memory that was let go is handed out again at once: an address in its place reads 7
    assert library.first(make([1.0, 2.0, 3.0, 4.0, 5.0], dtype=dtype), meanwhile) == 1


def test_no_address_is_handed_over_in_place_of_an_array():
    package = Path(stabilitylab.__file__).parent
    texts = {path: path.read_text("utf-8") for path in package.rglob("*.py") if path.name != "kernels.py"}
    assert not [path for path, text in texts.items() if re.search(r"\.ctypes\.data\b", text)]
