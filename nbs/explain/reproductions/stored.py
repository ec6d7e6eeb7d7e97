"""Measurements that take minutes, kept as data beside the code and read back by name

Results and experiments are trained once and shown many times. Each kind has one JSON file in this folder
with an entry a name, in the order in which the names are declared. One program writes at a time: of two
that store at once the later one wins, and the file is whole either way.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from stabilitylab.names.encode import to_json
from stabilitylab.names.files import write_atomic

FOLDER = Path(__file__).parent


def stored_rows(
    file: Path,  # a JSON file; one that is absent holds nothing
    order: Iterable[str],  # the declared names
) -> dict[str, dict]:  # name -> its entry, in that order, without names that are not declared
    "The entries of a file of measurements."
    rows = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return {name: rows[name] for name in order if name in rows}


def store_row(
    file: Path,  # a JSON file, created where it is absent
    name: str,  # one of `order`
    row: dict,  # plain data
    order: Iterable[str],  # the declared names
) -> Path:  # the file
    "Stores one entry, in place of an older one of its name."
    names = list(order)
    rows = stored_rows(file, names) | {name: row}
    write_atomic(file, to_json({key: rows[key] for key in names if key in rows}, indent=1) + "\n")
    return file
