"Statistics of attention against one forward pass of what they measure, and the memory they take."

import argparse
import resource
import subprocess
import sys
from time import thread_time

import torch
from torch.nn import functional as F

from stabilitylab.probe.attention_call import AttentionCall
from stabilitylab.probe.attention_heads import attention_statistics


def best(call, repeats=5):
    "Least processor time of `repeats` runs in seconds, after one to warm up."
    call()
    times = []
    for _ in range(repeats):
        begin = thread_time()
        call()
        times.append(thread_time() - begin)
    return min(times)


def made(length, heads, dtype=torch.float32):
    "Random queries, keys and values of one sequence."
    torch.manual_seed(0)
    return [torch.randn(1, heads, length, 64, dtype=dtype) for _ in range(3)]


def peak():
    "Largest resident memory of this process, MiB."
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory(length, heads):
    "Print the memory that a measurement adds to the process, MiB; run in a process of its own."
    small = [x[:, :, :256].contiguous() for x in made(length, heads)]
    attention_statistics(AttentionCall(*small, causal=True))
    call = AttentionCall(*made(length, heads), causal=True)
    before = peak()
    attention_statistics(call)
    print(peak() - before)


def main(argv=None):
    "Print the cost in forward passes at `--length`, and the memory in shares of the matrix at twice that."
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--memory", type=int, default=0)
    args = parser.parse_args(argv if argv is not None else [])
    if args.memory:
        return memory(args.memory, args.heads)
    torch.set_num_threads(1)
    q, k, v = made(args.length, args.heads)
    mask = torch.ones(args.length, args.length).tril().bool()
    for name, given, described in (
        ("full", {}, {}),
        ("causal", {"is_causal": True}, {"causal": True}),
        ("boolean mask", {"attn_mask": mask}, {"masks": (mask,)}),
    ):
        forward = best(lambda g=given: F.scaled_dot_product_attention(q, k, v, **g))
        measured = best(lambda d=described: attention_statistics(AttentionCall(q, k, v, **d)))
        times = f"{1e3 * measured:.0f} ms for {1e3 * forward:.0f} ms forward"
        print(f"{name}: {times}: {measured / forward:.2f} forward passes (allowed 2)")
    length = 2 * args.length
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.bench_attention",
        f"--memory={length}",
        f"--heads={args.heads}",
    ]
    added = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    matrix = args.heads * length**2 * 4 / 2**20
    print(f"memory at {length}: {added:.1f} MiB of {matrix:.0f} MiB: {added / matrix:.2%} (allowed 5 %)")


if __name__ == "__main__":
    main(sys.argv[1:])
