"Checkpoints from strangers: no file hangs, crashes or lies; what cannot be read is told in one line."

import argparse
import contextlib
import dataclasses
import json
import os
import pickle
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from stabilitylab.checkpoint.diff import diff_checkpoints
from stabilitylab.checkpoint.open import open_checkpoint
from stabilitylab.checkpoint.pickles import read_pickle
from stabilitylab.checkpoint.scan import scan_checkpoint
from stabilitylab.names.errors import InputError

DAG = b"\x80\x02]" + b"2\x86" * 40 + b"."  # a pair of a pair of …, 2**40 lists when unfolded
BOMBS = {
    "lists in lists": DAG,
    "tuples as a key": b"\x80\x02})" + b"2\x86" * 40 + b"K\x01s.",
    "a memo of gigabytes": b"\x80\x02K\x07r\xff\xff\xff\x7f.",
    "a text of gigabytes": b"\x80\x02X\xff\xff\xff\x7fa.",
    "a negative length": b"\x80\x02" + b"\x8b\xff\xff\xff\xff" * 9 + b".",
    "a long number": b"\x80\x02\x8b\x00\x00\x01\x00" + b"\x7f" * 65536 + b".",
    "deep tuples": b"\x80\x02)" + b"\x85" * 200_000 + b".",
    "copies of a copy": (
        b"\x80\x02X\x00\x00\x01\x00"
        + b"a" * 65536
        + b"q\x00"
        + b"c_codecs\nencode\nh\x00X\x06\0\0\0latin1\x86R" * 5000
        + b"."
    ),
    "an empty stack": b"\x80\x02R.",
    "no stop": b"\x80\x02]",
}


@contextlib.contextmanager
def calls():
    "Counts the functions that run in the block: work, as the clock of a busy machine cannot say it."
    count = [0]

    def profile(frame, event, argument):
        count[0] += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        yield count
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_defused(name, tmp_path):
    path = tmp_path / "bomb.pkl"
    path.write_bytes(BOMBS[name])
    with calls() as count:
        try:
            assert len(open_checkpoint(path)) == 0
        except InputError as e:
            assert len(str(e).splitlines()) == 1
    assert count[0] < 20 * (100_000 + len(BOMBS[name])), count


def test_meta_sparse_and_complex_tensors(tmp_path):
    values = {
        "meta": torch.empty(3, 4, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "turn": torch.tensor([[3 + 4j, 0], [0, 0]]),
        "real": torch.ones(2),
    }
    torch.save(values, tmp_path / "a.pt")
    save_file({"turn": values["turn"]}, tmp_path / "b.safetensors")
    ckpt = open_checkpoint(tmp_path / "a.pt")
    table = scan_checkpoint(ckpt, progress=False)
    assert list(ckpt) == ["turn", "real"] and set(ckpt.left_out) == {"meta", "sparse"}
    assert "3×4" in ckpt.left_out["meta"] and table.attrs["left_out"] == ckpt.left_out
    assert table.loc["turn", "zeros"] == 6 and np.isclose(table.loc["turn", "rms"] ** 2 * 8, 25)
    assert torch.equal(open_checkpoint(tmp_path / "b.safetensors")["turn"].load(), values["turn"])
    torch.save(values | {"turn": values["turn"] + 1j}, tmp_path / "c.pt")
    moved = diff_checkpoints(tmp_path / "a.pt", tmp_path / "c.pt", progress=False)
    assert moved.loc["turn", "unchanged"] == 0.5 and np.isclose(moved.loc["turn", "change"], 2 / 5)


def test_work_is_proportional_to_the_number_of_keys():
    "Three opcodes a key (text, memo, number), and a bounded number of calls for each."
    data = pickle.dumps({f"layers.{i}.weight": i for i in range(20_000)}, protocol=2)
    with calls() as count:
        assert len(read_pickle(data, "keys.pkl").value) == 20_000
    assert count[0] < 20 * 3 * 20_000, count


@dataclasses.dataclass
class Settings:
    lr: float = 0.5


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
        self.register_buffer("count", torch.tensor(7))


def test_objects_are_read_as_data(tmp_path):
    model = Net()
    here = tmp_path / "a.pt"
    values = {
        "args": argparse.Namespace(lr=3e-4, out=Path("runs/a")),
        "simple": types.SimpleNamespace(wd=0.1),
        "settings": Settings(),
        "numpy": np.float64(2.5),
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "flag": np.bool_(True),
        "seen": {1, 2},
        "net": model,
    }
    torch.save(values, here)
    ckpt = open_checkpoint(here)
    assert ckpt.extra["args.lr"] == 3e-4 and ckpt.extra["args.out"] == "runs/a"
    assert ckpt.extra["simple.wd"] == 0.1 and ckpt.extra["settings.lr"] == 0.5
    assert ckpt.extra["numpy"] == 2.5 and ckpt.extra["flag"] is True
    assert torch.equal(ckpt["array"].load(), torch.from_numpy(values["array"]))
    got = ckpt.state_dict("net.")
    assert set(got) == set(model.state_dict())
    assert all(torch.equal(got[name], tensor) for name, tensor in model.state_dict().items())


def test_an_omegaconf_configuration_is_read_as_data(tmp_path, monkeypatch):
    "A DictConfig as pickled: classes of the same names, content, nodes, and a link to the parent."
    config = types.ModuleType("omegaconf.dictconfig")
    node = type("AnyNode", (), {"__module__": "omegaconf.dictconfig"})
    made = type("DictConfig", (), {"__module__": "omegaconf.dictconfig"})
    config.AnyNode, config.DictConfig = node, made
    rate, whole = node(), made()
    rate.__dict__ = {"_val": 3e-4, "_parent": whole, "_metadata": None}
    whole.__dict__ = {"_content": {"lr": rate}, "_parent": None}
    monkeypatch.setitem(sys.modules, "omegaconf", types.ModuleType("omegaconf"))
    monkeypatch.setitem(sys.modules, "omegaconf.dictconfig", config)
    torch.save({"cfg": whole, "w": torch.ones(1)}, tmp_path / "a.pt")
    monkeypatch.undo()
    ckpt = open_checkpoint(tmp_path / "a.pt")
    assert ckpt.extra == {"cfg.lr": 3e-4} and list(ckpt) == ["w"]


@pytest.mark.parametrize("module, name", [("subprocess", "Popen"), ("builtins", "eval"), ("os", "system")])
def test_what_would_run_is_refused_by_name(module, name, tmp_path):
    for verb in (b"R", b"\x81"):
        data = b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"X\x04\0\0\0true\x85" + verb + b"."
        (tmp_path / "a.pkl").write_bytes(data)
        with pytest.raises(InputError, match=f"wants to run {module}.{name}"):
            open_checkpoint(tmp_path / "a.pkl")


def test_names_of_wrappers_meet(tmp_path):
    w = torch.ones(3)
    torch.save({"a.w": w, "b": w, "module.c": w, "c": w}, tmp_path / "a.pt")
    torch.save({"_orig_mod.a.w": w * float("nan"), "module._orig_mod.b": w, "c": w}, tmp_path / "b.pt")
    table = diff_checkpoints(tmp_path / "a.pt", tmp_path / "b.pt", progress=False)
    assert table.index[0] == "a.w" and table.became_nonfinite.tolist() == [3, 0, 0]
    assert table.attrs["renamed"] == [("a.w", "_orig_mod.a.w"), ("b", "module._orig_mod.b")]
    assert table.attrs["only_a"] == ["module.c"] and table.attrs["only_b"] == []


def test_escapes_in_names_are_shown_harmless(tmp_path):
    torch.save({"w\x1b[2J\nfake": torch.ones(2)}, tmp_path / "a.pt")
    ckpt = open_checkpoint(tmp_path / "a.pt")
    with pytest.raises(InputError) as e:
        ckpt["other"]
    assert "\x1b" not in str(e.value) and "\\x1b" in str(e.value) and "\n" not in str(e.value)


def test_a_hub_cache_opens_and_other_links_do_not(tmp_path):
    repo = tmp_path / "models--a--b"
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for folder in ("blobs", "refs"):
        (repo / folder).mkdir()
    (repo / "refs" / "main").write_text("abc")
    save_file({"w": torch.ones(2)}, repo / "blobs" / "0123")
    (snapshot / "s.safetensors").symlink_to("../../blobs/0123")
    index = json.dumps({"weight_map": {"w": "s.safetensors"}})
    (snapshot / "model.safetensors.index.json").write_text(index)
    for path in (repo, snapshot):
        assert open_checkpoint(path)["w"].load().tolist() == [1, 1]
    save_file({"w": torch.ones(2)}, tmp_path / "private")
    (snapshot / "s.safetensors").unlink()
    (snapshot / "s.safetensors").symlink_to(tmp_path / "private")
    with pytest.raises(InputError, match="outside of the folder"):
        open_checkpoint(snapshot)
    (repo / "refs" / "main").write_text("../..")
    with pytest.raises(InputError, match="no folder inside"):
        open_checkpoint(repo)


def test_a_file_larger_than_the_memory_opens_and_is_never_called_damaged(tmp_path):
    resource, path = pytest.importorskip("resource"), tmp_path / "model.safetensors"
    n = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    header = json.dumps({"w": {"dtype": "F32", "shape": [n], "data_offsets": [0, 4 * n]}}).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * n)  # a hole
    assert open_checkpoint(path)["w"].shape == (n,)
    pages, before = (
        int(Path("/proc/self/statm").read_text().split()[0]),
        resource.getrlimit(resource.RLIMIT_AS),
    )
    try:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30, before[1]))
        with pytest.raises(InputError, match=r"cannot be mapped; allow its .* bytes"):
            open_checkpoint(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def forged_dcp(folder, corners):
    "A distributed checkpoint of a tensor (4, 4) whose list gives each piece this offset and shape."
    pieces = {f"piece{i}": torch.full(size, float(i + 1)) for i, (_, size) in enumerate(corners)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(pieces, checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    whole, stored = metadata.state_dict_metadata["piece0"], {}
    chunks = []
    for i, (offset, size) in enumerate(corners):
        where = metadata.storage_data[dcp.metadata.MetadataIndex(f"piece{i}", (0,) * len(size), 0)]
        stored[dcp.metadata.MetadataIndex("w", torch.Size(offset), i)] = where
        chunks.append(dcp.metadata.ChunkStorageMetadata(torch.Size(offset), torch.Size(size)))
    table = {"w": dataclasses.replace(whole, size=torch.Size((4, 4)), chunks=chunks)}
    forged = dataclasses.replace(metadata, state_dict_metadata=table, storage_data=stored)
    (folder / ".metadata").write_bytes(pickle.dumps(forged))
    return open_checkpoint(folder)["w"]


def test_pieces_of_a_tensor_hold_every_value_once(tmp_path):
    quarters = [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2)), ((2, 2), (2, 2))]
    whole = forged_dcp(tmp_path / "whole", quarters).load()
    assert whole.tolist() == [[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 4, 4], [3, 3, 4, 4]]
    # as many values as the tensor has, but its last row, or its last column, is in none of the pieces
    twice = {
        "rows": [((0, 0), (2, 4)), ((1, 0), (2, 4))],
        "columns": [((0, 0), (4, 2)), ((0, 1), (4, 2))],
        "three": [((0, 0), (1, 4)), ((1, 0), (2, 4)), ((2, 0), (1, 4))],
    }
    for name, corners in twice.items():
        with pytest.raises(InputError, match="parts of w overlap"):
            forged_dcp(tmp_path / name, corners).load()
    with pytest.raises(InputError, match="lies outside"):
        forged_dcp(tmp_path / "outside", [((0, 0), (2, 4)), ((3, 0), (2, 4))]).load()
    with pytest.raises(InputError, match="not whole"):
        forged_dcp(tmp_path / "missing", quarters[:3]).load()


def test_files_of_ranks(tmp_path):
    w = torch.arange(4.0)
    for name in (
        "llama",
        "megatron/iter_0000020/mp_rank_00",
        "megatron/iter_0000020/mp_rank_01",
        "zero/global_step9",
    ):
        os.makedirs(tmp_path / name)
    torch.save({"w": w}, tmp_path / "llama" / "consolidated.00.pth")
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("20\n")
    for rank in range(2):
        folder = tmp_path / "megatron" / "iter_0000020" / f"mp_rank_0{rank}"
        torch.save({"model": {"w": w + rank}, "iteration": 20}, folder / "model_optim_rng.pt")
    (tmp_path / "zero" / "latest").write_text("global_step9")
    torch.save({"module": {"w": w}}, tmp_path / "zero" / "global_step9" / "mp_rank_00_model_states.pt")
    for name, tensor in {"llama": "w", "megatron": "mp_rank_01.model.w", "zero": "module.w"}.items():
        ckpt = open_checkpoint(tmp_path / name)
        assert ckpt.format == "ranks" and tensor in ckpt and "written by" in ckpt.extra
    both = open_checkpoint(tmp_path / "megatron").state_dict("mp_rank_01.model.")
    assert torch.equal(both["w"], w + 1)
