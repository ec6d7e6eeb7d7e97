"""What was measured, the oracle it was held against, and the verdict, as data

Each reproduction is a function that measures and compares; it returns what it found, whatever that is. A
`Result` keeps the numbers, each with what was expected of it, and says *reproduced* only where all of
them came out.

Limits: An oracle says what is expected at this size. What does not shrink (spikes of large models,
natural sinks, massive activations) has no oracle here and is no result.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import cache
from importlib import import_module
from pathlib import Path

import pandas as pd

from reproductions.stored import FOLDER, store_row, stored_rows
from stabilitylab.names.encode import plain
from stabilitylab.names.errors import bad_input

# What a result is


@dataclass(frozen=True)
class Check:
    "One number beside what was expected of it."

    what: str  # that was measured
    value: float | str | list  # as measured
    expected: str  # in words
    holds: bool | None = None  # whether the value is as expected; None: nothing is expected, it is only told

    def __post_init__(self) -> None:
        object.__setattr__(self, "holds", None if self.holds is None else bool(self.holds))
        object.__setattr__(self, "value", plain(self.value))


@dataclass(frozen=True)
class Result:
    "What one reproduction came to."

    name: str  # such as 'R1'
    checks: tuple[Check, ...]  # the numbers and their oracles
    settings: str  # model, data, steps, and what was scaled down
    seeds: tuple[int, ...] = ()  # () for what is exact
    curves: dict = field(default_factory=dict)  # {'x', 'y', 'log': axes, 'lines': name -> [xs, ys]}, or {}
    seconds: float = 0.0  # that it took
    date: str = ""  # of the measurement

    @property
    def verdict(self) -> str:  # 'reproduced', 'partly' or 'not reproduced'
        "What the checks say together."
        judged = [check.holds for check in self.checks if check.holds is not None]
        held = sum(judged)
        if held == len(judged):
            return "reproduced"
        return "partly" if held else "not reproduced"

    def to_dict(self) -> dict:
        "Plain data, as JSON has it, the verdict included."
        return plain(asdict(self)) | {"verdict": self.verdict}


def result_of(
    row: dict,  # of `Result.to_dict`
) -> Result:  # the same
    "A stored result as an object."
    known = {name: value for name, value in row.items() if name != "verdict"}
    checks = tuple(Check(**check) for check in row["checks"])
    return Result(**(known | {"checks": checks, "seeds": tuple(row["seeds"])}))


# The list


@dataclass(frozen=True)
class Reproduction:
    "A published result and how it is made again."

    name: str  # such as 'R1'
    title: str  # in words
    source: str  # where it was reported
    place: str  # 'module:function' of this folder; the function returns a Result
    page: str = ""  # of this site that tells more
    is_quick: bool = False  # whether it takes seconds


REPRODUCTIONS = {
    one.name: one
    for one in (
        Reproduction(
            "R1",
            "Attention logits grow with the learning rate, and normalised queries and keys stop it",
            "Wortsman et al., 2309.14322; Dehghani et al., 2302.05442",
            "trained:attention_logits",
            "explain/attention_logits",
        ),
        Reproduction(
            "R2",
            "A bf16 loss has eleven values",
            "IDEFICS-80B memo",
            "exact:eleven_values",
            "explain/eleven_values",
            True,
        ),
        Reproduction(
            "R2b",
            "Accumulation is not batch size",
            "Hugging Face, 2024",
            "exact:accumulation",
            "explain/accumulation_is_not_batch_size",
            True,
        ),
        Reproduction(
            "R3",
            "bf16 weights lose updates; stochastic rounding keeps them",
            "2502.20566; torchao",
            "trained:bf16_weights",
            "explain/pure_bf16_training",
        ),
        Reproduction(
            "R4b",
            "Scaling inside the product keeps fp16 attention in range",
            "OPT-175B; BLOOM",
            "exact:inside_scale",
            "explain/inside_qk",
            True,
        ),
        Reproduction(
            "R4c",
            "An epsilon of 1e-8 is zero in fp16",
            "a practitioner's notes",
            "exact:fp16_epsilon",
            "explain/pure_bf16_training",
            True,
        ),
        Reproduction(
            "R5",
            "Spikes that float64 does not have",
            "2605.06152",
            "mechanisms:rounding_spikes",
            "explain/spikes_of_rounding",
        ),
        Reproduction(
            "R6", "The softmax makes the sink", "2603.11487", "mechanisms:sinks", "explain/attention_sinks"
        ),
        Reproduction(
            "R7",
            "Adam spikes on one dimension",
            "2506.04805; Wortsman et al., 2304.13013",
            "exact:adam_spikes",
            "explain/adam_before_the_spike",
            True,
        ),
        Reproduction("R8", "The dose of z-loss", "PaLM; OLMo 2", "trained:z_loss_dose"),
        Reproduction(
            "R9",
            "The fp16 loss scale falls, saws and collapses",
            "Megatron-LM; metaseq",
            "exact:loss_scale",
            "",
            True,
        ),
        Reproduction(
            "R10",
            "Small embeddings make large early gradients",
            "Takase et al., 2312.16903; BLOOM",
            "exact:embedding_scale",
            "",
            True,
        ),
        Reproduction(
            "R10b",
            "Wide initial weights slow a run down",
            "Nguyen and Salazar, 1910.05895; BLOOM-104B",
            "trained:wide_init",
        ),
        Reproduction(
            "R11", "Repeated n-grams make large gradients", "OLMo 2, 2501.00656", "mechanisms:repeats"
        ),
        Reproduction(
            "R12",
            "Another mixture after a resume looks like a spike",
            "IDEFICS-80B memo",
            "mechanisms:resume_mixture",
        ),
        Reproduction(
            "R12b",
            "Repeated data look like progress, then like a level shift",
            "ML Engineering",
            "mechanisms:repeated_data",
        ),
        Reproduction("R13", "Warm-up", "Wortsman et al., 2309.14322", "trained:warmup"),
        Reproduction(
            "R14",
            "The lower bound of attention entropy",
            "Zhai et al., 2303.06296",
            "exact:entropy_bound",
            "",
            True,
        ),
        Reproduction(
            "R15",
            "Shrinking the embedding's gradient changes no output",
            "GLM-130B",
            "exact:embedding_shrink",
            "",
            True,
        ),
        Reproduction("R16", "Positions collide in bf16", "arithmetic", "exact:bf16_positions", "", True),
        Reproduction(
            "R17",
            "Batch, state, or their combination",
            "PaLM",
            "replayed:batch_and_state",
            "howto/which_batch",
        ),
        Reproduction(
            "R18",
            "A flipped bit is transient or persistent",
            "Megatron-LM's rerun machine",
            "replayed:bit_flip",
            "howto/is_it_the_hardware",
        ),
        Reproduction(
            "G1",
            "The gradient norm leads the loss by one step",
            "BLOOM tr8-104B, experiment 11",
            "exact:gradient_leads",
            "",
            True,
        ),
    )
}


def _known(name: str) -> Reproduction:
    "The reproduction of a name, or an error that lists them."
    if name not in REPRODUCTIONS:
        raise bad_input("name", name, ", ".join(REPRODUCTIONS))
    return REPRODUCTIONS[name]


def reproduce(
    name: str,  # a key of REPRODUCTIONS
) -> Result:  # measured now
    "Make a published result again."
    module, function = _known(name).place.split(":")
    measure: Callable = getattr(import_module(f"reproductions.{module}"), function)
    begin = time.perf_counter()
    result = measure()
    seconds = round(time.perf_counter() - begin, 2)
    return replace(result, name=name, seconds=seconds, date=date.today().isoformat())


# Trainings take minutes, so what they gave is kept as data beside the code, with date, seconds and seeds.

_STORED = FOLDER / "results.json"


@cache
def stored_results() -> dict[str, Result]:
    "The stored results by name."
    rows = stored_rows(_STORED, REPRODUCTIONS)
    return {name: result_of(row) for name, row in rows.items()}


def store_result(
    result: Result,  # measured
) -> Path:  # the file of all results
    "Keep a result beside the code, in place of an older one."
    file = store_row(_STORED, result.name, result.to_dict(), REPRODUCTIONS)
    stored_results.cache_clear()
    return file


def _held(result: Result) -> str:
    "How many checks hold, of those that have an oracle."
    judged = [check.holds for check in result.checks if check.holds is not None]
    return f"{sum(judged)} of {len(judged)}"


def results_table() -> pd.DataFrame:  # index: name; title, verdict, checks held, seconds, seeds
    "One row a published result."
    rows = {}
    for name, one in REPRODUCTIONS.items():
        result = stored_results().get(name)
        rows[name] = {
            "title": one.title,
            "verdict": result.verdict if result else "not run",
            "checks": _held(result) if result else "",
            "seeds": len(result.seeds) if result else 0,
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("result")


def checks_table(
    names: list[str] | None = None,  # of results; None: all that are stored
) -> pd.DataFrame:  # a row a check: result, what, value, expected, holds
    "Every number beside its oracle."
    picked = stored_results() if names is None else {n: stored_results()[_known(n).name] for n in names}
    rows = [
        {"result": name, "what": c.what, "value": c.value, "expected": c.expected, "holds": c.holds}
        for name, result in picked.items()
        for c in result.checks
    ]
    return pd.DataFrame(rows, columns=["result", "what", "value", "expected", "holds"])
