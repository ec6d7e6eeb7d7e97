"TensorBoard event files against the tensorboard package, nothing thinned out."

import statistics
import struct
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from stabilitylab.read.logs.tensorboard import read_events


def write(path, n):
    "`n` scalars of four tags, framed as TensorBoard does, with the checksums that its own reader wants."
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    values = np.random.default_rng(0).normal(size=n)
    with open(path, "wb") as f:

        def put(m):
            head = struct.pack("<Q", len(m))
            f.write(head + struct.pack("<I", masked_crc32c(head)) + m + struct.pack("<I", masked_crc32c(m)))

        put(b"\x09" + bytes(8) + b"\x1a\x0dbrain.Event:2")
        for i in range(n):
            step, tag = i // 4, (b"loss", b"lrrr", b"norm", b"time")[i % 4]
            varint = b""
            while True:
                varint += bytes([step & 127 | (128 if step > 127 else 0)])
                step >>= 7
                if not step:
                    break
            v = b"\x0a\x04" + tag + b"\x15" + struct.pack("<f", values[i])
            put(
                b"\x09"
                + struct.pack("<d", 1e9 + i)
                + b"\x10"
                + varint
                + b"\x2a"
                + bytes([len(v) + 2])
                + b"\x0a"
                + bytes([len(v)])
                + v
            )


def main(n=200_000):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as d:
        write(path := Path(d) / "events.out.tfevents.1.x", n)

        def theirs():
            a = EventAccumulator(d, size_guidance={"scalars": 0})
            a.Reload()
            return sum(len(a.Scalars(t)) for t in a.Tags()["scalars"])

        def ours():
            return sum(len(s.step) for s in read_events(path).samples.values())

        def tbparse():
            from tbparse import SummaryReader

            return len(SummaryReader(str(path)).scalars)

        times = {theirs: [], ours: []} | ({tbparse: []} if find_spec("tbparse") else {})
        for _ in range(3):
            for f in times:
                begin = time.process_time()
                got = f()
                times[f].append(time.process_time() - begin)
                assert got == n, (f.__name__, got)
    a, b, *others = (statistics.median(t) for t in times.values())
    print(
        f"EventAccumulator {n / a:,.0f} scalars/s, ours {n / b:,.0f} scalars/s, ratio {a / b:.1f} "
        f"(goal 20; medians of 3, interleaved, {n:,} scalars)"
        + "".join(f"; tbparse {n / c:,.0f} scalars/s, ratio {c / b:.1f}" for c in others)
    )


if __name__ == "__main__":
    main()
