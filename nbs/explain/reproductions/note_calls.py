"Make a call of the table of notes, and say whether it found what its item says"

import ast
import builtins
import importlib
from collections.abc import Sized
from functools import cache
from typing import cast

import numpy as np
import pandas as pd
import torch
import xarray as xr

from reproductions import note_logs, note_states, note_trials, vision
from stabilitylab import _modidx
from stabilitylab.names.errors import bad_input


@cache
def homes() -> dict[str, str]:
    "Public function or class of the package, and of what the notes' calls use -> module."
    found: dict[str, str] = {}
    for module, symbols in cast(dict, _modidx.d["syms"]).items():
        found |= {
            s.removeprefix(f"{module}."): module for s in symbols if s.count(".") == module.count(".") + 1
        }
    for own in (note_logs, note_states, note_trials, vision):
        names = (
            name for name, value in vars(own).items() if getattr(value, "__module__", "") == own.__name__
        )
        found |= dict.fromkeys(names, own.__name__)
    return found


def run_call(
    call: str,  # Python expression over public names of the package, `np`, `torch` and `xr`
) -> object:  # the value of the expression
    "The result of a call from the table of notes; it may use every public name of the package."
    names = {node.id for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Name)}
    scope = {"np": np, "torch": torch, "xr": xr}
    for name in names & set(homes()) - set(dir(builtins)):
        scope[name] = getattr(importlib.import_module(homes()[name]), name)
    return eval(call, scope)


def is_found(
    result: object,  # result of a call
) -> bool:
    "Whether a result is not empty, zero or False, and contains no empty table."
    tables = (
        [part for part in result if isinstance(part, pd.DataFrame)]
        if isinstance(result, tuple | list)
        else []
    )
    if tables:
        return all(map(len, tables))
    is_number = isinstance(result, bool | int | float | np.generic)
    if isinstance(result, str) or not (is_number or isinstance(result, Sized)):
        raise bad_input(
            "result", type(result).__name__, "a table, a list, a number or a bool: others tell nothing"
        )
    return len(result) > 0 if isinstance(result, Sized) else bool(result)
