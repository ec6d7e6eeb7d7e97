"Statistics of attention against one forward pass of what they measure, and the memory they take."

import argparse
import itertools
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import thread_time

import torch
from torch.nn import functional as F

from stabilitylab.detect.diagnose import diagnose
from stabilitylab.probe.attention.call import AttentionCall
from stabilitylab.probe.attention.heads import attention_statistics


def best(calls, repeats=7):
    "Least processor time of each of `calls` in seconds, taken in turn after one run to warm up."
    times = [[] for _ in calls]
    for _ in range(repeats + 1):
        for call, own in zip(calls, times, strict=True):
            begin = thread_time()
            call()
            own.append(thread_time() - begin)
    return [min(own[1:]) for own in times]


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


def alarms(seeds):
    "Print what `diagnose` says of runs at a healthy learning rate and at one that lets the logits grow."
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from test_attention_recorder import language_model

    told, late = {3e-3: 0, 1e-1: 0}, []
    for lr, seed in itertools.product(told, range(seeds)):
        with tempfile.TemporaryDirectory() as folder:
            run = language_model(f"{folder}/r", seed, lr, 120)
            found = diagnose(run).of("attention_logit_growth").at_least("warning")
            told[lr] += bool(found)
            logits = run["attention"].attn_logit_max.max(("layer", "head"))
            if found:
                late.append(found[0].onset - int(logits.step[(logits >= 100).values.argmax()]))
    print(
        f"{seeds} healthy runs: {told[3e-3]} alarms; {seeds} planted: {told[1e-1]} found, {late} steps late"
    )


def main(argv=None):
    "Print the cost in forward passes at `--length`, and the memory in shares of the matrix at twice that."
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--memory", type=int, default=0)
    parser.add_argument("--alarms", type=int, default=0)
    args = parser.parse_args(argv if argv is not None else [])
    if args.alarms:
        return alarms(args.alarms)
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
        call = AttentionCall(q, k, v, **described)
        forward, measured, exact = best(
            (
                lambda g=given: F.scaled_dot_product_attention(q, k, v, **g),
                lambda c=call: attention_statistics(c),
                lambda c=call: attention_statistics(c, dtype=torch.float64),
            )
        )
        times = f"{1e3 * measured:.0f} ms for {1e3 * forward:.0f} ms forward"
        print(f"{name}: {times}: {measured / forward:.2f} forward passes (allowed 2)", end="")
        print(f"; {exact / forward:.2f} where large logits need float64")
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
