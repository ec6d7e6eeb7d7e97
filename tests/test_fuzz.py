"Spoilt and made-up inputs for every reader, the same ones every time; `make fuzz` tries more."

import random
import time
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stabilitylab.checkpoint.pickles import read_pickle
from stabilitylab.names.errors import InputError
from tests.fuzz import seeds
from tests.fuzz.run import fuzz, open_one, read_one, tell_one

BUDGET = {"derandomize": True, "deadline": None, "suppress_health_check": list(HealthCheck)}
TEXTS = {f"{name}.log": data for name, data in seeds.text_seeds().items()}
LOGS = TEXTS | {f"{name}.json": data for name, data in seeds.table_seeds().items()}


@pytest.mark.slow  # many made-up inputs
def test_no_spoilt_input_ends_in_a_fault():
    outcomes = fuzz(1500, seed=2)
    assert {outcome for _, outcome in outcomes} <= {"read", "refused"}, outcomes
    assert {kind for kind, _ in outcomes} == {"log", "diagnosis", "checkpoint", "pickle"}


def test_the_good_inputs_are_read(tmp_path):
    "Else the changes would be of inputs that are refused at once."
    for name, data in {**TEXTS, **seeds.checkpoint_seeds()}.items():
        path = tmp_path / name
        path.write_bytes(data)
        (open_one if name in seeds.checkpoint_seeds() else read_one)(path)


@given(st.binary(max_size=300))
@settings(max_examples=300, **BUDGET)
def test_bytes_are_a_pickle_or_refused(data):
    try:
        read_pickle(data, "made-up.pkl")
    except InputError as e:
        assert len(str(e).splitlines()) == 1


@given(st.sampled_from(sorted(LOGS)), st.integers(0, 2**32))
@settings(max_examples=60, **BUDGET)
def test_a_spoilt_log_is_read_or_refused_in_one_line(tmp_path_factory, name, seed):
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(seeds.spoil(LOGS[name], random.Random(seed)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read_one(path)
        except InputError as e:
            assert len(str(e).splitlines()) == 1


@pytest.mark.parametrize(
    "word", [b"a" * 40_000, b"1" * 40_000, b"a: " * 13_000, b"1," * 20_000, b" " * 40_000]
)
@pytest.mark.parametrize("name", ["nanogpt.log", "generic.log", "hf_stdout.log", "megatron.log"])
def test_a_long_word_costs_no_more_than_its_length(name, word, tmp_path):
    good = LOGS[name]
    half = good.index(b"\n", len(good) // 2)
    path = tmp_path / name
    path.write_bytes(good[:half] + word + good[half:])
    begin = time.process_time()
    try:
        read_one(path)
    except InputError as e:
        assert len(str(e).splitlines()) == 1
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    "name, step", [("nanogpt.log", 2**63), ("jsonl.log", 2**63), ("generic.log", 10**30), ("csv.log", 10**15)]
)
def test_a_step_beyond_all_counting_costs_its_line(name, step, tmp_path):
    path = tmp_path / name
    path.write_bytes(LOGS[name].replace(b"120", str(step).encode(), 1))
    try:
        tell_one(path)
    except InputError as e:
        assert "step" in str(e) and len(str(e).splitlines()) == 1
