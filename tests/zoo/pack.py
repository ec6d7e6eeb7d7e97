"Packs runs of the zoo without their states and batches: `python -m tests.zoo.pack FOLDER`."

import io
import re
import sys
import tarfile
from pathlib import Path

from stabilitylab.run.checksums import sealed, unsealed

RECORDS = Path(__file__).with_name("records")
PACKED = (  # the smallest run of each cause, and two healthy ones
    *("conv rate", "lstm raised", "moe cold", "rnn labels", "rnn inputs", "conv shift", "lstm repeat"),
    *("lstm wide", "conv dead", "rnn unclipped", "lstm moments", "lstm eps", "diffusion fp16", "conv bf16"),
    *("gpt attention", "gpt output", "lstm tokens", "conv flip", "lstm mask", "rnn", "lstm bf16 pass"),
)


def _bare(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    "The entry without its time and its owner."
    entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
    return entry


def _rewritten(path: Path) -> bytes:
    "Attributes with the last part of each path, which names no machine; an index without sizes and sums."
    if path.name == "index.json":
        index = unsealed(path.read_bytes())
        for row in (*index["snapshots"], *index["batches"]):
            del row["bytes"], row["crc32c"]
        return sealed(index).encode()
    return re.sub(r'"/[^"]*/([^"/]*)"', r'"\1"', path.read_text(encoding="utf-8")).encode()


def pack(name: str, folder: Path) -> Path:
    "The record of a run as one file; of each state and batch only that it was kept."
    source, target = folder / f"{name.replace(' ', '_')}_0", RECORDS / f"{name.replace(' ', '_')}.tar.xz"
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for path in sorted(source.rglob("*")):
            if path.suffix == ".pt":
                archive.addfile(_bare(tarfile.TarInfo(str(path.relative_to(source)))))
            elif path.name == "index.json" or path == source / "zarr.json":
                data = _rewritten(path)
                entry = _bare(tarfile.TarInfo(str(path.relative_to(source))))
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
            elif path.is_file() and path.name not in ("replay_setup.py", "checksums.json"):
                archive.add(path, path.relative_to(source), filter=_bare)
    return target


if __name__ == "__main__":
    for name in PACKED:
        print(pack(name, Path(sys.argv[1])))
