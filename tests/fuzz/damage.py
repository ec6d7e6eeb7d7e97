"Changed bytes and cut ends of files with checksums; `python -m tests.fuzz.damage [COUNT]` counts what came."

import io
import json
import random
import shutil
import struct
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xarray as xr

from stabilitylab.checkpoint.open import open_checkpoint
from stabilitylab.names.errors import InputError
from stabilitylab.numerics.pytree import tensors_of
from stabilitylab.probe.blackbox import read_entry
from stabilitylab.probe.recorder import Recorder
from stabilitylab.read.recognise import recognise
from stabilitylab.run.record import open_run, pack_run
from stabilitylab.run.recording import opened
from tests.fuzz import seeds


@dataclass(frozen=True)
class Subject:
    "Files that are damaged one at a time, and how they are read."

    name: str
    folder: Path
    read: Callable[[Path], tuple[dict, list]]  # -> what was read by name, and what was named as left out

    def files(self) -> list[Path]:
        "All of them, smaller ones too."
        return sorted(
            f for f in self.folder.rglob("*") if f.is_file() and f.stat().st_size and f.suffix != ".py"
        )


def record_values(path: Path) -> tuple[dict, list]:
    "Every number and text of a record, a row at a time: (group, variable, step, turn of the step) -> values."
    run = open_run(path).load()
    values = {("attrs", key): json.dumps(value) for key, value in run.attrs.items() if key != "skipped"}
    for group in run.children:
        table = run[group].to_dataset(inherit=False)
        for name, variable in table.variables.items():
            values |= _rows(group, str(name), variable, table)
    return values, list(run.attrs.get("skipped", {}))


def _rows(group: str, name: str, variable: xr.Variable, table: xr.Dataset) -> Iterator[tuple]:
    "The rows of one variable by their steps."
    if "step" not in variable.dims:
        return {(group, name): variable.values.tolist()} if group != "events" else {}
    seen: Counter = Counter()
    rows = {}
    for step, row in zip(table.step.values.tolist(), variable.values, strict=True):
        rows[group, name, step, seen[step]] = np.asarray(row)
        seen[step] += 1
    return rows


def checkpoint_values(path: Path) -> tuple[dict, list]:
    "Every tensor of a checkpoint."
    ckpt = open_checkpoint(next(path.iterdir()))
    values, lost = {}, list(ckpt.left_out)
    for name in ckpt:
        try:
            values[name] = ckpt[name].load().numpy()
        except InputError as error:
            lost.append(str(error))
    return values, lost


def box_values(path: Path) -> tuple[dict, list]:
    "Every tensor of the snapshots and batches of a black box."
    index = opened(path).box()
    values: dict = {("settings", row["step"]): json.dumps(row) for row in index.settings}
    for row in index.snapshots + index.batches:
        for i, tensor in enumerate(tensors_of(read_entry(index.folder, row))):
            values[row["file"], i] = tensor.numpy()
    return values, [damage.words for damage in index.damages]


def log_values(path: Path) -> tuple[dict, list]:
    "Every scalar of an event file or a file of Weights & Biases."
    chosen = recognise(next(path.iterdir()))
    log = chosen.read(next(path.iterdir()))
    values = {
        (name, int(step)): np.array([value])
        for name, samples in log.samples.items()
        for step, value in zip(samples.step, samples.value, strict=True)
    }
    return values, list(log.skipped)


def _is_same(whole: object, read: object) -> bool:
    "Whether what was read is what was written, where it is anything."
    if isinstance(whole, np.ndarray) and whole.dtype.kind == "f":
        read = np.asarray(read)
        return read.shape == whole.shape and bool(((read == whole) | np.isnan(read)).all())
    if isinstance(whole, np.ndarray):
        return np.array_equal(whole, read)
    return whole == read


def outcome(subject: Subject, whole: dict) -> str:
    "What became of damaged files: read, refused, named or a fault."
    try:
        values, named = subject.read(subject.folder)
    except InputError as error:
        return "refused" if len(str(error).splitlines()) == 1 else "a message of several lines"
    except Exception as error:
        last = error.__traceback__
        while last.tb_next:
            last = last.tb_next
        place = f"{Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno}"
        return f"{type(error).__name__} at {place}: {str(error)[:80]}"
    wrong = [key for key, value in values.items() if key in whole and not _is_same(whole[key], value)]
    made_up = [key for key in values if key not in whole]
    if wrong or made_up:
        return f"wrong: {(wrong + made_up)[0]}"
    is_less = len(values) < len(whole) or _count_nan(values) > _count_nan(whole)
    return "named" if named else "lost without a word" if is_less else "read"


def _count_nan(values: dict) -> int:
    "Numbers that are not there."
    return sum(
        int(np.isnan(v).sum()) for v in values.values() if isinstance(v, np.ndarray) and v.dtype.kind == "f"
    )


def damage(data: bytes, chance: random.Random) -> bytes:
    "One place changed: a bit, a byte, a run of bytes, or the end cut off."
    at, out = chance.randrange(len(data)), bytearray(data)
    match chance.randrange(4):
        case 0:
            out[at] ^= 1 << chance.randrange(8)
        case 1:
            out[at] = chance.randrange(256)
        case 2:
            out[at : at + 16] = bytes(len(out[at : at + 16]))
        case 3:
            del out[at:]
    return bytes(out)


def _train(path: Path, steps: int = 12, **options: object) -> None:
    "A record of a small model, in parts of two steps."
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    with Recorder(model, optimizer, path, flush_seconds=0.0, **options) as recorder:
        for _ in range(steps):
            loss = model(recorder.batch(torch.randn(8, 4))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)
            time.sleep(0.01)


def subjects(folder: Path) -> Iterator[Subject]:
    "One of each kind of file that we write."
    closed, packed, live = (folder / name for name in ("closed", "packed", "live"))
    with redirect_stderr(io.StringIO()):
        _train(closed, snapshot_every=5)
        _train(live, merge=False)
    shutil.copytree(closed, packed, ignore=shutil.ignore_patterns("blackbox"))
    pack_run(packed)
    box = folder / "box"
    box.mkdir()
    (closed / "blackbox").rename(box / "blackbox")
    yield Subject("black box", box, box_values)
    for path in (closed, packed, live):
        shutil.rmtree(path / "blackbox", ignore_errors=True)
        yield Subject(f"{path.name} record", path, record_values)
    files = {
        "new.pt": (seeds.checkpoint_seeds()["new.pt"], checkpoint_values),
        "events.out.tfevents.1": (seeds.binary_seeds()["events.out.tfevents.1"], log_values),
        "run-1.wandb": (wandb_file(), log_values),
    }
    for name, (data, read) in files.items():
        (folder / name).mkdir()
        (folder / name / name).write_bytes(data)
        yield Subject(name, folder / name, read)


def wandb_file() -> bytes:
    "A file of Weights & Biases with checksums, 40 rows over more than one block."
    data = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
    for i in range(40):
        items = b"".join(
            b"\x0a" + bytes([len(one)]) + one
            for one in (_item("loss", f"{3 - i / 20}"), _item("iter", str(i)))
        )
        row = items + b"\x1a\xe8\x07" + bytes(1000)  # a field that nobody reads
        body = b"\x12" + bytes([len(row) & 127 | 128, len(row) >> 7]) + row
        left = 32768 - len(data) % 32768
        first = body if len(body) + 7 <= left else body[: left - 7]
        data += _piece(1 if first is body else 2, first)
        if first is not body:
            data += _piece(4, body[len(first) :])
    return data


def _item(key: str, value: str) -> bytes:
    "One number of a row."
    return b"\x0a" + bytes([len(key)]) + key.encode() + b"\x82\x01" + bytes([len(value)]) + value.encode()


def _piece(kind: int, body: bytes) -> bytes:
    "A piece of LevelDB's log with its checksum."
    return struct.pack("<IHB", zlib.crc32(bytes([kind]) + body), len(body), kind) + body


def run(
    count: int,  # damaged files
    seed: int = 0,  # of the random places
    seconds: float = float("inf"),  # after which it ends, whatever the count
) -> Counter:  # (subject, outcome) -> how often; 'read', 'named' and 'refused' are right
    "Damage one place, read, put the file back; again."
    chance, outcomes, begin = random.Random(seed), Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = list(subjects(Path(folder)))
        wholes = {subject.name: subject.read(subject.folder)[0] for subject in every}
        for i in range(count):
            subject = every[i % len(every)]
            file = chance.choice(subject.files())
            data = file.read_bytes()
            changed = damage(data, chance)
            file.write_bytes(changed)
            told = outcome(subject, wholes[subject.name])
            is_prefix = subject.read is log_values and data.startswith(changed)
            if is_prefix and told == "lost without a word":
                told = "read"  # a log that ends between two records is a shorter log
            if told not in ("read", "named", "refused"):
                told += f" [{file.relative_to(subject.folder)}]"
            outcomes[subject.name, told] += 1
            file.write_bytes(data)
            if time.monotonic() - begin > seconds:
                break
    return outcomes


def faults(outcomes: Counter) -> list[str]:
    "The outcomes that are none of the three right ones."
    return [told for _, told in outcomes if told not in ("read", "named", "refused")]


def main() -> int:
    "Counts of a run, a line each; 1 where there is a fault."
    outcomes = run(int(sys.argv[1]) if len(sys.argv) > 1 else 5000)
    for (name, told), count in sorted(outcomes.items()):
        print(f"{count:6}  {name:22} {told}")
    return int(bool(faults(outcomes)))


if __name__ == "__main__":
    sys.exit(main())
