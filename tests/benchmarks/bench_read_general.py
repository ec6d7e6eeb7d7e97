"The general reader on texts of unknown form, beside plain Python that only goes through their lines."

import random
import statistics
import tempfile
import time
from pathlib import Path

from stabilitylab.names.errors import InputError
from stabilitylab.read.logs.generic import read_generic

MEGABYTES = 8
VOCABULARY = """
the of and to in is that with for on as by this from are be was not it which at can all if each
loading loaded model data worker shard tokens cache index file tensor kernel launch graph trace memory device
stream buffer queue thread weight layer head node process group rank host port server client request response
loss epoch batch step read write found missing warning ignored using default version build library module
parameter value name type shape size list tree table column row field key path folder image text audio sample
user team project note first second last next new old large small fast slow true false none null started done
"""
WORDS = VOCABULARY.split()


def noisy(rng):
    "A loss."
    return 3 + rng.gauss(0, 0.1)


def records(rng, size):
    "Every line a record."
    lines, step = [], 0
    while size > 0:
        lines.append(
            f"[{step % 24:02d}:{step % 60:02d}:00] step {step} | loss {noisy(rng):.4f} | lr 1.0e-4\n"
        )
        size -= len(lines[-1])
        step += 10
    return "".join(lines)


def sentence(rng, number):
    "A line of words, of which no two are alike; every third has numbers."
    words = rng.choices(WORDS, k=rng.randint(4, 14))
    if number % 3 == 0:
        words.insert(rng.randrange(len(words)), str(rng.randint(0, 10**6)))
        words.insert(rng.randrange(len(words)), f"{rng.choice(WORDS)}={rng.randint(0, 99)}")
    return " ".join(words) + "\n"


def prose(rng, size, every=10_000):
    "Free text with a record in ten thousand lines."
    lines, number = [], 0
    while size > 0:
        number += 1
        is_record = number % every == 0
        lines.append(f"step {number} loss {noisy(rng):.4f}\n" if is_record else sentence(rng, number))
        size -= len(lines[-1])
    return "".join(lines)


def bars(rng, size):
    "Progress bars that overwrite themselves, with a loss behind each."
    parts, step = [], 0
    while size > 0:
        step += 1
        share = step % 100
        bar = "#" * (share // 5) + " " * (20 - share // 5)
        end = "\n" if share == 99 else "\r"
        parts.append(
            f"Epoch {step // 100}: {share:3d}%|{bar}| {share}/100 [00:{share:02d}<00:{99 - share:02d}, "
            f"{rng.gauss(5, 0.1):.2f}it/s, loss={noisy(rng):.3f}]{end}"
        )
        size -= len(parts[-1])
    return "".join(parts)


def settings(rng, size):
    "Records between dumps of settings and of environment, as at the beginning of every job."
    parts, step = [], 0
    while size > 0:
        step += 1
        block = [
            f"  {rng.choice(WORDS)}_{rng.choice(WORDS)}: {rng.choice(('null', rng.randint(0, 999)))}\n"
            for _ in range(20)
        ]
        parts.append("".join(block) + f"step {step} loss {noisy(rng):.4f}\n")
        size -= len(parts[-1])
    return "".join(parts)


KINDS = {"records": records, "prose": prose, "bars": bars, "settings": settings}


def plain(path):
    "The number of lines, one at a time."
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def ours(path):
    "The number of records that the general reader finds."
    try:
        return max(len(samples.step) for samples in read_generic(path).samples.values())
    except InputError:
        return 0


def main():
    rng = random.Random(0)
    print(
        f"{'text':10} {'MB':>5} {'lines':>9} {'records':>8} {'plain MB/s':>10} {'ours MB/s':>10}"
        "   (goal 20; medians of 3)"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, make in KINDS.items():
            path = Path(folder) / f"{name}.log"
            path.write_text(make(rng, MEGABYTES * 10**6))
            size, times, found = path.stat().st_size / 1e6, {plain: [], ours: []}, {}
            for _ in range(3):
                for reader, taken in times.items():
                    begin = time.process_time()
                    found[reader] = reader(path)
                    taken.append(time.process_time() - begin)
            speed = {reader: size / statistics.median(taken) for reader, taken in times.items()}
            row = f"{name:10} {size:5.0f} {found[plain]:9} {found[ours]:8}"
            print(f"{row} {speed[plain]:10.0f} {speed[ours]:10.1f}", flush=True)


if __name__ == "__main__":
    main()
