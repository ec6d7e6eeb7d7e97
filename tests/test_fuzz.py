"Spoilt and made-up inputs for every reader, the same ones every time; `make fuzz` tries more."

import json
import pickle
import random
import time
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stabilitylab.checkpoint.open import open_checkpoint
from stabilitylab.checkpoint.pickles import read_pickle
from stabilitylab.checkpoint.scan import scan_checkpoint
from stabilitylab.cli.main import main
from stabilitylab.names.errors import InputError
from stabilitylab.read.recognise import recognise
from stabilitylab.run.record import LiveStore, new_run, open_run, pack_run, save_run
from stabilitylab.run.scalars import Samples, make_scalars
from tests.fuzz import damage, seeds
from tests.fuzz.run import fuzz, open_one, read_one, tell_one

BUDGET = {"derandomize": True, "deadline": None, "suppress_health_check": list(HealthCheck)}
TEXTS = {f"{name}.log": data for name, data in seeds.text_seeds().items()}
LOGS = TEXTS | {f"{name}.json": data for name, data in seeds.table_seeds().items()}


@pytest.mark.slow  # many made-up inputs
def test_no_spoilt_input_ends_in_a_fault():
    outcomes = fuzz(1500, seed=2)
    assert {outcome for _, outcome in outcomes} <= {"read", "refused"}, outcomes
    assert {kind for kind, _ in outcomes} == {"log", "table", "diagnosis", "checkpoint", "pickle"}


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


@pytest.mark.parametrize("name", [b"04", b",4"])
def test_a_spoilt_name_of_a_type_is_refused(name):
    "Found by the fuzz: NumPy raises a SyntaxError of its own parser."
    good = pickle.dumps(np.float32(2))
    with pytest.raises(InputError, match="its pickle cannot be read") as error:
        read_pickle(good.replace(b"f4", name), "scalar.pkl")
    assert len(str(error.value).splitlines()) == 1 and b"f4" in good


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


@pytest.mark.slow  # hundreds of records are opened
def test_damage_is_left_out_and_named():
    "`python -m tests.fuzz.damage 5000` tries more; its outcomes stand in tests/benchmarks/RESULTS.md."
    outcomes = damage.run(300, seed=3)
    assert not damage.faults(outcomes), outcomes
    assert sum(count for (_, told), count in outcomes.items() if told == "named") > 150


def long_record(folder):
    "A record whose series lie in four chunks of 100 rows, as those of a long run do in chunks of 2**18."
    steps = np.arange(400)
    samples = {name: Samples(steps, 3 - steps / 200 + i) for i, name in enumerate(("loss", "lr"))}
    run = new_run(make_scalars(samples), {"model": "tiny"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stabilitylab.run.record._encodings.__defaults__", (100,))
        return run, save_run(run, folder)


def test_a_damaged_chunk_costs_its_steps(tmp_path):
    run, folder = long_record(tmp_path / "run")
    chunk = folder / "scalars" / "loss" / "c" / "2"
    chunk.write_bytes(chunk.read_bytes()[:-3])
    left = open_run(folder).load()
    loss = left["scalars"].loss
    assert loss.isnull().values.nonzero()[0].tolist() == list(range(200, 300))
    assert np.array_equal(loss.dropna("step"), np.delete(run["scalars"].loss.values, slice(200, 300)))
    assert left["scalars"].lr.identical(open_run(long_record(tmp_path / "b")[1])["scalars"].lr.load())
    assert list(left.attrs["skipped"]) == ["damaged loss of scalars, steps 200 to 299 (its checksum differs)"]


@pytest.mark.parametrize("gone", ["scalars/step/c/1", "scalars/step/zarr.json", "scalars/segment/zarr.json"])
def test_without_its_steps_a_table_is_none(gone, tmp_path):
    _, folder = long_record(tmp_path / "run")
    (folder / gone).unlink()
    left = open_run(folder)
    assert "scalars" not in left.children and left.attrs["model"] == "tiny"
    assert list(left.attrs["skipped"]) == ["damaged group scalars (missing)"]


@pytest.mark.parametrize("name", ["zarr.json", "checksums.json"])
def test_lost_settings_cost_no_number(name, tmp_path):
    run, folder = long_record(tmp_path / "run")
    (folder / name).write_bytes((folder / name).read_bytes().replace(b"a", b"b", 1))
    left = open_run(folder).load()
    assert np.array_equal(left["scalars"].loss, run["scalars"].loss) and len(left.attrs["skipped"]) == 1
    assert ("model" in left.attrs) == (name == "checksums.json")


def test_a_record_of_zarr_format_2_opens(tmp_path):
    run, _ = long_record(tmp_path / "new")
    run.to_zarr(tmp_path / "old", zarr_format=2)
    assert np.array_equal(open_run(tmp_path / "old")["scalars"].loss, run["scalars"].loss)
    chunk = tmp_path / "old" / "scalars" / "loss" / "0"
    chunk.write_bytes(b"no chunk")
    left = open_run(tmp_path / "old")
    assert list(left["scalars"].data_vars) == ["lr"] and len(left.attrs["skipped"]) == 1


def test_a_packed_record_whose_end_is_cut_off(tmp_path):
    _, folder = long_record(tmp_path / "run")
    packed = pack_run(folder)
    data = packed.read_bytes()
    packed.write_bytes(data[:-100])
    left = open_run(folder).load()
    assert float(left["scalars"].loss[0]) == 3 and left["scalars"].sizes["step"] == 400
    assert list(left.attrs["skipped"]) == ["damaged record.zip (its list of entries is cut off)"]


def half_the_bytes(data):
    "The header of an array asks for half the bytes: NumPy alone would read other numbers without a word."
    return data.replace(b"<f8", b"<f4")


def a_comment_over_the_rest_of_the_list(data):
    "zipfile takes the entries after it for its comment, and passes over them without a word."
    header, last = b"PK\1\2", data.rindex(b"PK\1\2")
    length_at = data.rindex(header, 0, last) + 32
    return data[:length_at] + bytes([data.rindex(b"PK\5\6") - last]) + data[length_at + 1 :]


@pytest.mark.parametrize("damaged", [half_the_bytes, a_comment_over_the_rest_of_the_list])
def test_a_damaged_part_is_named_with_its_steps(damaged, tmp_path):
    store = LiveStore(tmp_path / "run", {})
    for first in range(0, 30, 10):
        steps = np.arange(first, first + 10)
        rows = {"scalars/step": steps, "scalars/time": steps * 1.0, "scalars/loss": 3.0 - steps / 30}
        store.append(rows | {"scalars/has:loss": steps > -1})
    store.close(merge=False)
    part = sorted((tmp_path / "run" / "live").glob("part-*"))[1]
    part.write_bytes(damaged(part.read_bytes()))
    left = open_run(tmp_path / "run")
    assert left["scalars"].step.values.tolist() == [*range(10), *range(20, 30)]
    (words,) = left.attrs["skipped"]
    assert words.startswith(f"damaged {part.name}, steps 10 to 19")


def test_a_damaged_tensor_is_left_out_of_a_scan(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"a": torch.ones(100), "b": torch.full((100,), 2.0)}, path)
    data = path.read_bytes()
    path.write_bytes(data.replace(torch.ones(1).numpy().tobytes(), b"\0\0\0\x3f", 1))
    table = scan_checkpoint(path, progress=False)
    assert list(table.index) == ["b"] and "checksum differs" in table.attrs["left_out"]["a"]
    with pytest.raises(InputError, match="data/0 is damaged"):
        open_checkpoint(path)["a"].load()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(100)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert float(open_checkpoint(path)["a"].load().sum()) == 100


@pytest.mark.parametrize("at", [12, 60, 150])
def test_an_event_file_goes_on_after_damage(at, tmp_path):
    whole = seeds.event_file()
    path = tmp_path / "events.out.tfevents.1"
    first = len(whole) - 24 * 56  # 24 records of one length
    data = bytearray(whole)
    data[first + at] ^= 8
    path.write_bytes(data)
    log = recognise(path).read(path)
    steps = log.samples["loss"].step.tolist()
    assert len(steps) == 23 and set(log.skipped) & {"damaged event", "damaged bytes between records"}


def test_an_event_file_is_cut_in_a_record(tmp_path):
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(seeds.event_file()[:-20])
    log = recognise(path).read(path)
    assert len(log.samples["loss"].step) == 23 and set(log.skipped) == {"bytes at the end that are no record"}


def test_check_says_what_is_whole(tmp_path, capsys):
    _, folder = long_record(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("hello")
    assert main(["check", str(tmp_path)]) == 0 and "all whole; 1 files without" in capsys.readouterr().out
    chunk = folder / "scalars" / "lr" / "c" / "0"
    chunk.write_bytes(b"")
    assert main(["check", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["whole"] and told["damaged"] == [
        "damaged lr of scalars, steps 0 to 99 (its checksum differs)"
    ]
    assert main(["check", str(tmp_path / "nothing")]) == 2 and "check the spelling" in capsys.readouterr().err
