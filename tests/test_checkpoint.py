"""Checkpoints: every format round-trips, hostile files are refused with nothing executed.

Statistics equal slow twins, memory is bounded.
"""

import json
import os
import pickle
import struct
import subprocess
import sys
import warnings
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from stabilitylab.checkpoint.diff import diff_checkpoints
from stabilitylab.checkpoint.open import open_checkpoint
from stabilitylab.checkpoint.scan import _library, _sums_torch, piece_sums, scan_checkpoint
from stabilitylab.cli.main import main
from tests.command import command

OWN_PEAK = """
import sys, psutil, threading, time
from stabilitylab.checkpoint.scan import scan_checkpoint
me = psutil.Process()
base, peak, go = me.memory_full_info().uss, [0], [True]
def watch():
    while go[0]:
        peak[0] = max(peak[0], me.memory_full_info().uss)
        time.sleep(.02)
thread = threading.Thread(target=watch)
thread.start()
table = scan_checkpoint(sys.argv[1], progress=False)
go[0] = False
thread.join()
assert table.zeros.sum() == 250_000_000
print((peak[0] - base)/1e6)
"""
RESIDENT_PEAK = """
import resource, sys
import torch._subclasses.fake_tensor
from stabilitylab.checkpoint.scan import scan_checkpoint
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/1e3
base = peak()
table = scan_checkpoint(sys.argv[1], progress=False)
assert table.zeros.sum() == 150_000_000
print(peak() - base)
"""


def refused(path, words):
    with pytest.raises(ValueError, match=words):
        open_checkpoint(path)


def tiny_models():
    from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    small = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 64,
    }
    return {
        "gpt2": GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=32)),
        "llama": LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, **small)),
        "bert": BertModel(BertConfig(**small)),
    }


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_hugging_face_models_round_trip_in_all_formats(name, tmp_path):
    model = tiny_models()[name]
    want = model.state_dict()
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    torch.save(want, tmp_path / "model.pth")
    torch.save(want, tmp_path / "legacy.bin", _use_new_zipfile_serialization=False)
    torch.save({"module": {"model": want}, "iteration": 3}, tmp_path / "nested.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": want}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for path, prefix, kind in (
        ("whole", "", "safetensors"),
        ("shards", "", "sharded"),
        ("model.pth", "", "torch"),
        ("legacy.bin", "", "torch"),
        ("nested.pt", "module.model.", "torch"),
        ("dcp", "model.", "dcp"),
    ):
        ckpt = open_checkpoint(tmp_path / path)
        assert ckpt.format == kind
        got = ckpt.state_dict(prefix)
        assert got and all(torch.equal(t, want[n]) for n, t in got.items()), path
        missing = set(want) - set(got)
        assert all(
            any(torch.equal(want[m], t) for t in got.values() if t.shape == want[m].shape) for m in missing
        ), (path, missing)  # tied weights are stored once
        for t in list(ckpt.tensors.values())[:3]:
            assert torch.equal(torch.cat(list(t.chunks(64))).reshape(t.shape), t.load())


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
    ],
)
def test_every_type_of_a_safetensors_file(dtype, tmp_path):
    x = (torch.arange(24).reshape(6, 4) % 3).to(dtype)
    save_file({"x": x, "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}, tmp_path / "a.safetensors")
    ckpt = open_checkpoint(tmp_path / "a.safetensors")
    assert (
        torch.equal(ckpt["x"].load().double(), x.double())
        and ckpt["x"].dtype == dtype
        and ckpt["scalar"].load() == 2.5
        and ckpt["empty"].load().shape == (0, 4)
    )


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


def test_hostile_files_are_refused_and_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": Evil()}, "evil.pt")
    refused("evil.pt", r"wants to run .*system")
    with open("evil.bin", "wb") as f:
        pickle.dump(Evil(), f)
    refused("evil.bin", "wants to run|no torch file")
    os.mkdir("dcp")
    with open("dcp/.metadata", "wb") as f:
        pickle.dump(Evil(), f)
    refused("dcp", r"wants to run .*system")
    os.mkdir("up")
    for name in ("../evil.safetensors", "/etc/passwd"):
        with open("up/model.safetensors.index.json", "w") as f:
            json.dump({"weight_map": {"w": name}}, f)
        refused("up", "outside of the folder")
    with zipfile.ZipFile("bomb.pt", "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("archive/data.pkl", b"\0" * 50_000_000)
    refused("bomb.pt", "compressed archive")
    assert not os.path.exists("executed")


def test_damaged_files_say_what_is_wrong(tmp_path):
    save_file({"w": torch.ones(100, 100)}, tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[:-500])
    refused(tmp_path / "cut.safetensors", "damaged")
    (tmp_path / "long.safetensors").write_bytes(struct.pack("<Q", 2**40) + data[8:])
    refused(tmp_path / "long.safetensors", "cut or forged")
    torch.save({"w": torch.ones(1000)}, tmp_path / "a.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:-700])
    refused(tmp_path / "cut.pt", "cut or damaged")
    (tmp_path / "empty.pt").write_bytes(b"")
    refused(tmp_path / "empty.pt", "is empty")
    (tmp_path / "text.pt").write_text("hello world, this is text")
    refused(tmp_path / "text.pt", "no checkpoint that is known")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "it holds nothing")
    (tmp_path / "folder" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "gone.safetensors"}})
    )
    refused(tmp_path / "folder", "missing")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.arange(100.0)}, checkpoint_id=tmp_path / "d", no_dist=True)
    for f in (tmp_path / "d").glob("*.distcp"):
        f.write_bytes(f.read_bytes()[:-200])
    with pytest.raises(ValueError, match="damaged"):
        open_checkpoint(tmp_path / "d")["w"].load()


REAL = [
    ("bdytx5__grokking__model.pth", 53, "torch"),
    ("snakers4__silero-vad__silero_vad_16k.safetensors", 15, "safetensors"),
    ("LionRock-Research__Megatron-LM__ckpt", None, "dcp"),
]


@pytest.mark.parametrize("name, count, kind", REAL, ids=[r[0][:30] for r in REAL])
def test_real_checkpoints_open(real_logs, name, count, kind):
    ckpt = open_checkpoint(real_logs / "checkpoints" / name)
    table = scan_checkpoint(ckpt, progress=False)
    assert ckpt.format == kind and (count is None or len(ckpt) == count) and (table.nonfinite == 0).all()


def test_the_real_pointer_is_told_as_such(real_logs):
    refused(
        real_logs / "checkpoints" / "CoralReefFish__whisper-tiny-nbaiLab__LFS_POINTER__pytorch_model.bin",
        "Git-LFS pointer",
    )


def test_statistics_equal_a_slow_twin(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "normal": rng.normal(0, 0.02, (50, 40)),
        "wide": rng.standard_cauchy((30, 7)) * 1e6,
        "tiny": rng.normal(0, 1e-40, 64),
        "broken": np.where(rng.random(99) < 0.2, np.nan, 1.0),
    }
    tensors = {n: torch.from_numpy(a).float() for n, a in arrays.items()} | {
        "half": torch.from_numpy(arrays["normal"]).bfloat16()
    }
    torch.save(tensors, tmp_path / "a.pt")
    table = scan_checkpoint(tmp_path / "a.pt", progress=False, limit=256)
    for n, t in tensors.items():
        x = t.double().numpy().ravel()
        x = x[np.isfinite(x)]
        r = table.loc[n]
        assert (
            np.isclose(r.absmax, np.abs(x).max())
            and np.isclose(r.rms, np.sqrt((x**2).mean()), rtol=1e-5)
            and np.isclose(r["std"], x.std(), rtol=1e-4, atol=1e-6 * np.abs(x).max())
        ), n
        assert (
            r.nonfinite == int((~torch.isfinite(t)).sum())
            and r.zeros == int((t == 0).sum())
            and table.attrs["exponents"][n].sum() == t.numel()
        )
        assert r.distinct_bf16 == len({int(v) >> 16 for v in t.float().view(torch.int32).flatten()})


def test_differences_equal_a_slow_twin(tmp_path):
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.normal(size=(20, 30))).float()
    y = x.clone()
    y[:10] = torch.nextafter(torch.nextafter(y[:10], torch.tensor(9e9)), torch.tensor(9e9))
    torch.save({"x": x, "gone": x}, tmp_path / "a.pt")
    torch.save({"x": y, "new": x}, tmp_path / "b.pt")
    table = diff_checkpoints(tmp_path / "a.pt", tmp_path / "b.pt", progress=False)
    assert (
        table.loc["x", "unchanged"] == 0.5
        and table.loc["x", "median_ulps"] == 2
        and np.isclose(
            table.loc["x", "change"], float((y - x).double().norm() / x.double().norm()), rtol=1e-9
        )
    )
    assert table.attrs["only_a"] == ["gone"] and table.attrs["only_b"] == ["new"]


@pytest.mark.slow  # 1 GB
def test_a_file_larger_than_the_bound_is_scanned_within_it(tmp_path):
    "1 GB on disk; the peak above what imports take stays below 512 MB."
    path = tmp_path / "big.safetensors"
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [250_000, 1000], "data_offsets": [0, 10**9]}}
    ).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header)
        f.truncate(8 + len(header) + 10**9)
    out = subprocess.run([sys.executable, "-c", OWN_PEAK, str(path)], capture_output=True, text=True)
    assert out.returncode == 0 and float(out.stdout) < 512, out.stdout + out.stderr


@pytest.mark.slow  # 600 MB, in a process each
@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_torch_files_and_dcp_folders_leave_nothing_mapped(kind, tmp_path):
    "600 MB in one tensor: the resident memory, mapped pages included, grows by less than 200 MB."
    if kind == "torch":
        torch.save({"w": torch.zeros(150_000, 1000)}, tmp_path / "big.pt")
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"w": torch.zeros(150_000, 1000)}, checkpoint_id=tmp_path / "big.pt", no_dist=True)
    out = subprocess.run(
        [sys.executable, "-c", RESIDENT_PEAK, str(tmp_path / "big.pt")], capture_output=True, text=True
    )
    assert out.returncode == 0 and float(out.stdout) < 200, out.stdout + out.stderr


def test_views_of_storages_and_tensor_settings(tmp_path):
    w = torch.arange(1200.0).reshape(30, 40)
    torch.save(
        {
            "t": w.t(),
            "part": w[3:5],
            "same": w,
            "small": torch.ones(1).expand(5, 5),
            "optimizer": {"state": {}, "param_groups": [{"lr": torch.tensor(0.5), "params": []}]},
        },
        tmp_path / "a.pt",
    )
    ckpt = open_checkpoint(tmp_path / "a.pt")
    assert (
        torch.equal(ckpt["t"].load(), w.t())
        and torch.equal(ckpt["part"].load(), w[3:5])
        and torch.equal(ckpt["same"].load(), w)
        and torch.equal(ckpt["small"].load(), torch.ones(5, 5))
        and ckpt.groups[0]["lr"] == 0.5
    )
    assert (
        torch.equal(torch.cat(list(ckpt["t"].chunks(64))), w.t())
        and torch.equal(torch.cat(list(ckpt["same"].values(64))), w.flatten())
        and max(len(x) for x in ckpt["same"].values(64)) == 16
    )
    torch.save({"w": torch.ones(1).expand(10**6, 10**6)}, tmp_path / "huge.pt")
    refused(tmp_path / "huge.pt", "claims 1,000,000,000,000 values")
    for bad in ([1], {"w": 3}):
        (tmp_path / "up").mkdir(exist_ok=True)
        (tmp_path / "up" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": bad}))
        refused(tmp_path / "up", "no index of shards")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n, cols", [(1, 1), (31, 5), (5000, 7), (9000, 4096), (20_000, 6000)])
def test_the_compiled_sums_equal_those_of_operators(n, cols, dtype):
    if _library() is None:
        pytest.skip("SKIPPED: no C compiler, so only the operators are there")
    x = (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 1e3).to(dtype)
    x[::97] = 0
    x[1::101] = float("nan")
    x[2::103] = -float("inf")
    a, b = ((np.zeros(5), np.zeros(256, np.int64), np.zeros(65536, np.uint8)) for _ in range(2))
    rows, twin = piece_sums(x, cols, *a), _sums_torch(x.float(), cols, *b, np.zeros(-(-n // cols)))
    assert (
        np.allclose(rows, twin, rtol=1e-12)
        and np.allclose(a[0][:2], b[0][:2], rtol=1e-9)
        and (a[0][2:] == b[0][2:]).all()
        and (a[1] == b[1]).all()
        and (a[2] == b[2]).all()
    )


def test_differences_of_other_types_wide_rows_and_nan(tmp_path):
    x = torch.randn(1, 3_000_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = x.float()
    y[0, 7] = float("nan")
    y[0, 8:10] += 1
    z = torch.zeros(4)
    save_file({"x": x, "z": z}, tmp_path / "a.safetensors")
    save_file({"x": y, "z": z + 1}, tmp_path / "b.safetensors")
    table = diff_checkpoints(tmp_path / "a.safetensors", tmp_path / "b.safetensors", progress=False)
    r = table.loc["x"]
    assert (
        r.nonfinite == 1
        and np.isclose(r.unchanged, 1 - 3 / 3e6, rtol=1e-12)
        and r.max_change == 1
        and np.isclose(
            r.change, np.sqrt(2) / float(x[0][torch.arange(3_000_000) != 7].double().norm()), rtol=1e-9
        )
    )
    assert (
        table.loc["z", "change"] == np.inf
        and scan_checkpoint(tmp_path / "b.safetensors", progress=False).loc["x", "nonfinite"] == 1
    )


def test_the_commands_refuse_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": Evil()}, "evil.pt")
    for words in (["scan", "evil.pt"], ["diff", "evil.pt", "evil.pt"], ["scan", "nowhere"]):
        out = command(*words)
        assert out.returncode == 2 and out.stdout == "" and len(out.stderr.strip().splitlines()) == 1, words
        assert not os.path.exists("executed"), words


def test_a_random_state_is_not_beyond_fp16_and_a_rate_is_printed_short(tmp_path, capsys):
    state = {"model": {"w": torch.full((4, 4), 1e5)}, "rng": {"python": torch.full((600,), 2**31)}}
    state["optimizer"] = {"state": {}, "param_groups": [{"lr": 0.3 * 0.0005, "params": [0]}]}
    torch.save(state, tmp_path / "c.pt")
    assert main(["scan", str(tmp_path / "c.pt")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "beyond the range of fp16" in line] == ["model.w"]
    assert any("lr 0.00015" in line and "0.000150" not in line for line in lines)
