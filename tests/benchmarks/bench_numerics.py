"Rounding against a plain copy and torch's own cast, one core or a GPU."

import argparse
from time import perf_counter

import numpy as np
import torch

from stabilitylab.numerics.formats import quantise, stochastic_round


def best(call, sync, repeats=7):
    "Shortest of `repeats` runs in seconds, after one to warm up."
    call()
    sync()
    times = []
    for _ in range(repeats):
        start = perf_counter()
        call()
        sync()
        times.append(perf_counter() - start)
    return min(times)


def main(argv=None):
    "Print GB of float32 input a second, and the ratio to a plain copy in the same run."
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--millions", type=int, default=16)
    args = parser.parse_args(argv if argv is not None else [])
    torch.set_num_threads(1)
    x = np.random.default_rng(0).normal(size=args.millions * 1_000_000).astype(np.float32)
    t = torch.from_numpy(x).to(args.device)
    sync = torch.cuda.synchronize if args.device.startswith("cuda") else lambda: None
    calls = {
        "copy (limit)": lambda: t.clone(),
        "torch bf16 cast and back (peer)": lambda: t.bfloat16().float(),
        "torch fp16 cast and back (peer)": lambda: t.half().float(),
    }
    for f in ("bf16", "fp16", "tf32", "fp8_e4m3", "fp8_e5m2"):
        calls[f"quantise {f}, tensor"] = lambda f=f: quantise(t, f)
        if args.device == "cpu":
            calls[f"quantise {f}, array"] = lambda f=f: quantise(x, f)
    calls["stochastic_round bf16, tensor"] = lambda: stochastic_round(t, "bf16")
    took = {name: best(call, sync) for name, call in calls.items()}
    print(f"| on {args.device} | GB/s | of a copy |\n|---|---|---|")
    for name, s in took.items():
        print(f"| {name} | {x.nbytes / s / 1e9:.2f} | {took['copy (limit)'] / s:.2f} |")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
