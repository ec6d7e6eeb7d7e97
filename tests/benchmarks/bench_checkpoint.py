"A scan of a checkpoint against one plain pass over its bytes."

import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from stabilitylab.checkpoint.open import open_checkpoint
from stabilitylab.checkpoint.scan import scan_checkpoint


def plain(path):
    "The largest magnitude of every tensor, chunk by chunk: one read and one reduction."
    for t in open_checkpoint(path).tensors.values():
        for c in t.chunks():
            c.abs().max()


def read(path):
    "Nothing but reading the file."
    with open(path, "rb") as f:
        while f.read(2**25):
            pass


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as d:
        path = Path(d) / "a.safetensors"
        save_file({f"w{i}": torch.randn(4096, 4096) * 0.02 for i in range(6)}, path)
        size, times = path.stat().st_size / 1e9, {}
        for _ in range(5):
            for name, f in (
                ("read", read),
                ("absmax", plain),
                ("scan", lambda p: scan_checkpoint(p, progress=False)),
            ):
                begin = time.process_time()
                f(path)
                times.setdefault(name, []).append(time.process_time() - begin)
        speed = {k: size / statistics.median(v) for k, v in times.items()}
        print(
            f"{size:.2f} GB float32, one thread, medians of 5: "
            + ", ".join(f"{k} {v:.2f} GB/s" for k, v in speed.items())
            + f"; scan/read {speed['scan'] / speed['read']:.2f} (goal 0.70)"
            + f", scan/absmax {speed['scan'] / speed['absmax']:.2f}"
        )
