"What every object store must answer alike: files are put by `put(path, data)`, addresses begin with `root`."

import torch
from safetensors.torch import save_file

from stabilitylab.cli.main import main
from stabilitylab.read.runs import read_log, read_runs
from tests.scale import long_lines


def read_logs(put, root, capsys, weights=1000):
    "Reads a log and a folder of two runs beside weights; returns what `diagnose` of the log printed."
    for name in ("a/train.log", "b/train.log"):
        put(f"runs/{name}", long_lines.text("").encode())
    put("runs/a/model.safetensors", b"0" * weights)
    assert len(read_runs(f"{root}/runs")) == 2
    address = f"{root}/runs/a/train.log"
    loss = read_log(address).loss
    assert loss.sizes["step"] == 24 and float(loss[0]) == 3.0
    assert main(["diagnose", address]) == 0
    printed = capsys.readouterr()
    assert address in printed.out
    return printed.out + printed.err


def put_checkpoint(put, folder):
    "Puts model.safetensors with twenty layers of 40,000 bytes; returns the tensors."
    tensors = {f"layers.{i}.weight": torch.full((100, 100), float(i)) for i in range(20)}
    save_file(tensors, folder / "model.safetensors")
    put("model.safetensors", (folder / "model.safetensors").read_bytes())
    return tensors
