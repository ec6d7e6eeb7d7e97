"""Questions without an agreed answer: arms, seeds, intervals, reported whatever they show

Some claims of the notes contradict each other or did not come out at small scale. An experiment trains
all arms from the same seeds and reports the paired difference of each to the first arm with its 95 %
interval. There is no oracle: whatever comes out is the result.

Limits: Three seeds give wide intervals, and models of this size answer for themselves only.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd

from reproductions.stored import FOLDER, store_row, stored_rows
from stabilitylab.names.encode import plain
from stabilitylab.names.errors import bad_input
from stabilitylab.trial.outcome import judge, paired_interval

# What comes out


@dataclass(frozen=True)
class Outcome:
    "What the arms of one experiment came to."

    arms: dict[
        str, dict[str, list[float]]
    ]  # arm -> measure -> one value a seed; the first arm is the reference
    measure: str  # by which arms are compared; lower is better
    seeds: tuple[int, ...]  # of weights and batches
    settings: str  # model, data, steps
    name: str = ""  # of the experiment
    seconds: float = 0.0  # that it took
    date: str = ""  # of the measurement
    command: str = ""  # that makes it again

    def to_dict(self) -> dict:
        "Plain data, as JSON has it."
        return plain(asdict(self))

    def comparisons(self) -> pd.DataFrame:  # a row an arm: mean, effect, low, high, verdict
        "Each arm beside the first, with the 95 % interval of the paired difference."
        first, *_ = self.arms
        base = np.array(self.arms[first][self.measure], float)
        rows = {}
        for arm, measures in self.arms.items():
            values = np.array(measures[self.measure], float)
            low, high = paired_interval(values - base)
            said = "reference" if arm == first else judge(values - base, float(base.mean()), (0, 0))[0]
            rows[arm] = {"mean": values.mean(), "effect": (values - base).mean(), "low": low, "high": high}
            rows[arm]["verdict"] = said
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("arm")

    def means(self) -> pd.DataFrame:  # a row an arm, a column a measure
        "Every measure, averaged over seeds."
        rows = {arm: pd.Series(measures).map(np.mean) for arm, measures in self.arms.items()}
        return pd.DataFrame(rows).T.astype(float).rename_axis("arm")


@dataclass(frozen=True)
class Experiment:
    "A question and who trains its answer."

    name: str  # such as 'non_cures'
    question: str  # in words
    source: str  # where the claim comes from
    function: str  # of `arms.py`; gives an `Outcome`
    answer: str = field(default="")  # what the stored numbers say, in words


def _listed(*rows: tuple) -> dict[str, Experiment]:
    "Experiments by name."
    return {row[0]: Experiment(*row) for row in rows}


EXPERIMENTS = _listed(
    ("depth_width", "Are deep and narrow models less stable?", "Hugging Face VLM note", "depth_width"),
    ("stable_adamw", "Does update clipping help a language model?", "2304.13013", "stable_adamw"),
    (
        "natural_sinks",
        "Do sinks appear by themselves in tiny models?",
        "Gu et al., 2410.10781",
        "natural_sinks",
    ),
    ("non_cures", "Which remedies help at a rate that is too high?", "Hugging Face VLM note", "non_cures"),
    (
        "positions",
        "Which positions does a tiny translator learn with?",
        "a practitioner's notes",
        "positions",
    ),
    (
        "lora_embeddings",
        "Does LoRA on embeddings spoil later fine-tuning?",
        "a practitioner's notes",
        "lora_embeddings",
    ),
    (
        "frozen_vlm",
        "What of the frozen VLM shows in bf16, and what helps?",
        "Hugging Face VLM note",
        "frozen_vlm",
    ),
    ("warmup", "How much warm-up is enough?", "2309.14322; BLOOM", "warmup_lengths"),
    ("embedding_norm", "Does a norm behind the embedding help?", "BLOOM; GLM-130B", "embedding_norm"),
    ("beta2", "Does a lower β₂ help?", "OPT-175B; BLOOM; Wortsman et al.", "beta2"),
)


def _known(name: str) -> Experiment:
    "The experiment of a name, or an error that lists them."
    if name not in EXPERIMENTS:
        raise bad_input("name", name, ", ".join(EXPERIMENTS))
    return EXPERIMENTS[name]


def run_experiment(
    name: str,  # a key of EXPERIMENTS
) -> Outcome:  # measured now
    "Train all arms of an experiment."
    train: Callable = getattr(import_module("reproductions.arms"), _known(name).function)
    begin = time.perf_counter()
    outcome = train()
    command = f"python -m reproductions experiment {name}"
    seconds, today = round(time.perf_counter() - begin, 1), date.today().isoformat()
    return replace(outcome, name=name, seconds=seconds, date=today, command=command)


_STORED = FOLDER / "experiments.json"


def _read(rows: dict) -> Outcome:
    "A stored outcome as an object."
    return Outcome(**(rows | {"seeds": tuple(rows["seeds"])}))


@cache
def stored_outcomes() -> dict[str, Outcome]:
    "The stored outcomes by name."
    rows = stored_rows(_STORED, EXPERIMENTS)
    return {name: _read(row) for name, row in rows.items()}


def store_outcome(
    outcome: Outcome,  # measured
) -> Path:  # the file of all outcomes
    "Keep an outcome beside the code, in place of an older one."
    file = store_row(_STORED, outcome.name, outcome.to_dict(), EXPERIMENTS)
    stored_outcomes.cache_clear()
    return file
