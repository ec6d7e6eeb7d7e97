"""Sixteen learning rates as one model against one after the other, and what a trial adds to a bare loop.

Goals: at least 4 times as fast on 2 CPU cores where possible; a trial's step at most 5 % dearer."""

import os
import statistics
import tempfile
import time

import torch

from stabilitylab.run.job import Job
from stabilitylab.trial.arm import Arm, ArmTraining
from stabilitylab.trial.batched import BatchedTraining
from stabilitylab.trial.settings import Recipe, proxy_training

RATES = [3e-4 * 10 ** (place / 5) for place in range(16)]  # three decades
SHAPE = {"d_model": 64, "n_layer": 4, "clip": 1.0}  # 0.2 M parameters
SIZES = ((1, 16), (1, 64), (4, 64), (16, 64))  # sequences a step, tokens a sequence


def bare_step(training, step):
    "Seconds of one step as a user writes it."
    begin = time.perf_counter()
    training.schedule(training.optimizer, step)
    (part,) = training.batches(step)
    training.optimizer.zero_grad()
    loss = training.loss(training.model, part)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    training.optimizer.step()
    loss.item()
    return time.perf_counter() - begin


def one_after_another(batch, seq, steps):
    "Seconds of one step of all rates, each trained by itself."
    each = []
    for rate in RATES[::5]:  # every rate costs the same
        training = proxy_training(lr=rate, batch=batch, seq=seq, **SHAPE)
        seconds = [bare_step(training, step) for step in range(steps)]
        each.append(statistics.median(seconds[2:]))
    return len(RATES) * statistics.median(each)


def as_one(batch, seq, steps, rates=RATES):
    "Seconds of one step of all rates as one model."
    bundle = BatchedTraining([proxy_training(lr=rate, batch=batch, seq=seq, **SHAPE) for rate in rates])
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        bundle.run_step()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[2:])


def half(batch, seq, steps, place):
    "What one of two processes does: half of the rates as one model, on one thread."
    torch.set_num_threads(1)
    return as_one(batch, seq, steps, RATES[place::2])


def two_processes(batch, seq, steps):
    "Seconds of one step of all rates, as two models in two processes: what `sweep` does on two processors."
    arguments = {"batch": batch, "seq": seq, "steps": steps}
    jobs = [Job.of("tests.benchmarks.bench_trials:half", place=place, **arguments) for place in range(2)]
    states = [job.wait() for job in jobs]
    return max(state.result for state in states)


def overhead(steps=150):
    "Seconds of a step of a bare loop and of an arm of a trial, in turn: medians."
    shape = SHAPE | {"batch": 8, "seq": 64, "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        lane = ArmTraining(Recipe(**shape).start.to_dict(), Arm().to_dict(), 0, steps, folder)
        bare, theirs, ours = proxy_training(**shape), [], []
        for step in range(steps):
            theirs.append(bare_step(bare, step))
            begin = time.perf_counter()
            done = lane.training.run_step()
            lane.write(done, time.perf_counter() - begin)
            ours.append(time.perf_counter() - begin)
    return statistics.median(theirs[10:]), statistics.median(ours[10:])


def main(steps=12):
    "Prints the figures."
    torch.set_flush_denormal(True)
    params = sum(p.numel() for p in proxy_training(**SHAPE).model.parameters())
    print(
        f"16 learning rates, {params / 1e6:.2f} M parameters, {os.cpu_count()} processors, ms a step of all"
    )
    print(
        " batch  seq |  one by one, 1 thread  2 threads | one model, 1 thread  2 threads | 2 processes | gain"
    )
    for batch, seq in SIZES:
        row = {}
        for threads in (1, 2):
            torch.set_num_threads(threads)
            row[f"single{threads}"] = one_after_another(batch, seq, steps)
            row[f"one{threads}"] = as_one(batch, seq, steps)
        row["two"] = two_processes(batch, seq, steps)
        gain = min(row["single1"], row["single2"]) / min(row["one1"], row["one2"], row["two"])
        ms = {name: 1e3 * seconds for name, seconds in row.items()}
        print(
            f"{batch:6d} {seq:4d} | {ms['single1']:21.0f} {ms['single2']:10.0f} | {ms['one1']:19.0f}"
            f" {ms['one2']:10.0f} | {ms['two']:11.0f} | {gain:.1f}x",
            flush=True,
        )
    torch.set_num_threads(1)
    bare, ours = overhead()
    ms = f"{1e3 * bare:.2f} ms, arm of a trial {1e3 * ours:.2f} ms"
    print(f"a step: bare loop {ms}: {ours / bare - 1:+.1%} (goal 5 %)")


if __name__ == "__main__":
    main()
