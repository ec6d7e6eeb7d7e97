"Long lines, of the kinds that progress bars, dumps and encoders leave in logs; `main` prints what they cost."

import base64
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from stabilitylab.read.runs import read_runs

PIECES: dict[str, Callable[[random.Random, int], str]] = {  # kind -> a line of about so many characters
    "digits": lambda chance, n: "".join(chance.choices("0123456789", k=n)),
    "spaces": lambda chance, n: "loss" + " " * n + "1.0",
    "quotes": lambda chance, n: "loss \"a' " * (n // 9),
    "brackets": lambda chance, n: "([{" * (n // 3),
    "pairs": lambda chance, n: " ".join(f"key{i}={chance.random():.4f}" for i in range(n // 14)),
    "base64": lambda chance, n: base64.b64encode(chance.randbytes(n * 3 // 4)).decode(),
    "escaped JSON": lambda chance, n: json.dumps(json.dumps({f"k{i}": {"loss": i} for i in range(n // 22)})),
    "progress bars": lambda chance, n: "\r".join(
        f" {i % 100}%|####    | {i}/9999 [00:{i % 60:02d}<01:00, 3.1it/s, time={i / 1e4:.4f}]"
        for i in range(n // 60)
    ),
    "unicode": lambda chance, n: "значение 损失 … é " * (n // 17),
    "ANSI": lambda chance, n: "\x1b[31mgrey\x1b[0m 1.5 " * (n // 18),
    "one word": lambda chance, n: "a" * n,
    "dots": lambda chance, n: "1.2.3.4-" * (n // 8),
    "tabs": lambda chance, n: "1\t" * (n // 2),
    "errors": lambda chance, n: "Traceback (most recent call last) Error: " * (n // 41),
}
RECORDS = [f"step {i}: loss={3 - i / 50:.4f} lr=1e-4" for i in range(24)]


def text(
    line: str,  # without its end
    after: int = 8,  # after so many records
) -> str:
    "A log that has one long line among its records."
    return "\n".join([*RECORDS[:after], line, *RECORDS[after:]]) + "\n"


def seconds(line: str) -> float:  # of the processor
    "What reading a log takes that has one long line."
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.log"
        path.write_text(text(line), encoding="utf-8")
        begin = time.process_time()
        read_runs(path)
        return time.process_time() - begin


def main(sizes: tuple[int, ...] = (20_000, 168_000, 1_000_000)) -> None:
    "Microseconds of the processor a byte, by kind and length."
    seconds("")
    rest = min(seconds("") for _ in range(3))
    print(f"{'kind':15}" + "".join(f"{size:>12,}" for size in sizes) + "   characters (goal 1 µs a byte)")
    for kind, line in PIECES.items():
        lines = [line(random.Random(0), size) for size in sizes]
        cost = ((min(seconds(each) for _ in range(2)) - rest) / len(each.encode()) * 1e6 for each in lines)
        print(f"{kind:15}" + "".join(f"{micro:12.2f}" for micro in cost), flush=True)


if __name__ == "__main__":
    main()
