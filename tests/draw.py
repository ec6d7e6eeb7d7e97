"""A blind draw of strangers' logs, scored: `python -m tests.draw` prints one row a log and the totals.

`../shared/real_logs/draw3/truth.json` holds what is in each log, read by hand and by readers of its own;
the table below says what an answer must name. A truth is never changed after the product has read the log.
"""

import json
import math
import re
import sys
import warnings
from dataclasses import dataclass, fields
from pathlib import Path

import xarray as xr

from stabilitylab import diagnose, read_runs
from stabilitylab.detect.findings import Findings
from stabilitylab.detect.likely_cause import most_likely
from stabilitylab.names.errors import InputError
from stabilitylab.run.curves import loss_name, scalars_of
from stabilitylab.run.scalars import series

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "real_logs"
if not SHARED.exists():
    SHARED = Path(__file__).resolve().parents[3] / "shared" / "real_logs"
DRAW = SHARED / "draw3"

CAN_NOT_TELL = re.compile(r"[Cc]an't tell|[Nn]othing .*tells")


@dataclass(frozen=True)
class Wanted:
    "What an answer about one log must name; a log without an entry must stay quiet."

    event: str = ""  # kinds of findings, one of which must be told; '': there is no event
    severity: str = "warning"  # that it must have at least
    crash: str = ""  # words that the crash that ended the run must have; '': the run did not die
    top: str = ""  # words of an acceptable most likely cause; '': none is acceptable but silence
    may: str = ""  # kinds that may be told, too
    n_drawn: int = 0  # values of the loss where a bar is redrawn and each counts once
    steps_by_hand: bool = False  # the truth has the bars' own positions, which run ahead of the records
    not_loss: bool = False  # the series of the truth is no training loss, and must not be taken for one


DRAW3 = {  # by the `id` of truth.json
    12: Wanted("not_learning|plateau|divergence", top="not learn|reaches the weights|plateau|stopped|rate"),
    13: Wanted("loss_spike", top="batch|data|spike"),
    14: Wanted(not_loss=True),
    16: Wanted(crash="cancelled", top="cancelled|preempt"),
    21: Wanted("not_learning|plateau|leak_suspected", top="learn|zero|labels|mask|plateau"),
    23: Wanted(not_loss=True),
    25: Wanted(crash="GPU error|CUDA assert", top="assert|index|label"),
    30: Wanted("entropy", crash="exception|worker|child", top="entropy|worker|actor|node"),
    33: Wanted(not_loss=True),
    34: Wanted("loss_spike|restart", severity="info"),
    42: Wanted("overfitting", top="by heart|overfit"),
    49: Wanted("leak_suspected|zero", top="zero|label|mask|trivial", n_drawn=38),
    50: Wanted("resume_spike|divergence|loss_spike", severity="error", top="restart|resume"),
    69: Wanted(not_loss=True),
    71: Wanted(crash="out of GPU memory", top="memory|had no room"),
    81: Wanted(steps_by_hand=True),
    87: Wanted("non_finite", severity="info", top="validation|evaluation", not_loss=True),
    89: Wanted("overflow|loss_scale|not_learning|plateau|skip", severity="info"),
    98: Wanted("overfitting", severity="info", top="by heart|overfit", may="overfitting", not_loss=True),
    105: Wanted("divergence|slow_rise|resume_spike|level_shift", severity="info", top="restart|resume"),
}
EARLIEST = {50: 47_720}  # the onset must be told by then


@dataclass(frozen=True)
class Score:
    "What became of one log; None where there is nothing to judge."

    name: str
    loss: bool | None  # count, first, last, least and greatest value
    steps: bool | None  # first and last step
    crash: bool | None
    event: bool | None
    quiet: bool | None  # of a log without an event or a crash: no warning and no error
    top: str  # right, can't tell, wrong, or '' where there is none and none is needed
    told: str  # what the product said


def is_near(got: float, true: float) -> bool:
    "Whether two numbers are one, to the digits that a log prints."
    return math.isclose(float(got), float(true), rel_tol=1e-3, abs_tol=1e-9)


def loss_is_right(run: xr.DataTree, truth: dict, counts: set[int], not_loss: bool) -> tuple[bool, bool]:
    "Whether the training loss of a run, and its steps, are those of the truth."
    name = loss_name(run)
    if not_loss:  # what is in the log is validation, or one number a run
        is_training = name is not None and series(scalars_of(run), name).attrs.get("long_name") == "loss"
        return not (name == "loss" or is_training), True
    if name is None:
        return False, False
    loss = series(scalars_of(run), name)
    value, step = loss.values, loss.step.values
    got = (value[0], value[-1], value.min(), value.max())
    true = (truth["first"][1], truth["last"][1], truth["min"], truth["max"])
    is_right = len(value) in counts and all(is_near(a, b) for a, b in zip(got, true, strict=True))
    first, last = truth["first"][0], truth["last"][0]
    ends = step[0] == first and (step[-1] == last or truth["step_back"] > 0)
    return is_right, bool(ends) or first is None


def top_of(told: str, wanted: Wanted, is_needed: bool) -> str:
    "How good a most likely cause is."
    if not told:
        return "missing" if is_needed else ""
    if wanted.top and re.search(wanted.top, told):
        return "right"
    return "can't tell" if CAN_NOT_TELL.search(told) else "wrong"


def score(entry: dict, folder: Path, wanted: Wanted) -> Score:
    "The score of one log."
    path = folder / entry["folder"]
    inside = list(path.iterdir())
    path = inside[0] if len(inside) == 1 and inside[0].is_file() else path
    truth = entry["label_series"]
    try:
        runs = read_runs(path)
    except InputError as error:
        loss = None if truth is None else wanted.not_loss
        is_quiet = not (wanted.event or wanted.crash)
        return Score(
            entry["folder"], loss, None, None if is_quiet else False, None, is_quiet, "", str(error)[:60]
        )
    loss = steps = None
    if truth is not None:
        counts = {truth["n"], wanted.n_drawn or truth["steps_distinct"]}
        pairs = [loss_is_right(run, truth, counts, wanted.not_loss) for run in runs.values()]
        loss, steps = (all if wanted.not_loss else any)(p[0] for p in pairs), any(p[1] for p in pairs)
        steps = None if wanted.steps_by_hand else steps
    findings = [diagnose(run) for run in runs.values()]
    return Score(entry["folder"], loss, steps, *judged(findings, wanted, EARLIEST.get(entry["id"])))


def judged(all_findings: list[Findings], wanted: Wanted, earliest: int | None) -> tuple:
    "Crash, event, quiet and top of the findings, and what was told."
    every = [f for findings in all_findings for f in findings]
    deaths = [f for f in every if f.kind == "crash" and f.evidence.get("ended")]
    alarms = [f for f in every if f.severity != "info" and f.kind != "crash"]
    tops = [most_likely(findings) for findings in all_findings]
    told_top = next((top.cause for top in tops if top is not None), "")
    words = [f"{f.evidence.get('cause')} {f.evidence.get('message', '')}" for f in deaths]
    crash = None
    if wanted.crash or deaths:
        crash = bool(wanted.crash) and any(re.search(wanted.crash, text) for text in words)
    event = None
    if wanted.event:
        levels = ("info", "warning", "error")
        severe = levels[levels.index(wanted.severity) :]
        event = any(
            re.search(wanted.event, f"{f.kind} {f.explanation}")
            and f.severity in severe
            and (earliest is None or (f.onset is not None and f.onset <= earliest))
            for f in every
        )
    quiet = None if wanted.event and wanted.severity != "info" else True
    if quiet:
        allowed = f"{wanted.event}|{wanted.may}".strip("|")
        quiet = not [f for f in alarms if not (allowed and re.search(allowed, f.kind))]
    needs_top = bool(wanted.crash) or (bool(wanted.event) and wanted.severity != "info")
    told = "; ".join(f"{f.severity[0]}:{f.kind}@{f.onset}" for f in (deaths + alarms)[:4])
    return crash, event, quiet, top_of(told_top, wanted, needs_top), f"{told} | {told_top[:60]}"


def scores_of(folder: Path = DRAW, wanted: dict[int, Wanted] = DRAW3) -> list[Score]:
    "The scores of a draw."
    warnings.simplefilter("ignore")
    entries = json.loads((folder / "truth.json").read_text(encoding="utf-8"))
    return [score(entry, folder, wanted.get(entry["id"], Wanted())) for entry in entries]


def totals(scores: list[Score]) -> dict[str, tuple[int, int]]:
    "How many are right, of how many that could be judged."
    shares = {}
    for name in ("loss", "steps", "crash", "event", "quiet"):
        known = [answer for one in scores if (answer := getattr(one, name)) is not None]
        shares[name] = sum(known), len(known)
    tops = [one.top for one in scores if one.top]
    shares |= {f"top {word}": (tops.count(word), len(tops)) for word in sorted(set(tops))}
    return shares


def table(scores: list[Score]) -> str:
    "One line a log."
    marks = {True: "yes", False: "NO", None: "-"}
    rows = [f"{'log':36} " + " ".join(f"{field.name:6}" for field in fields(Score)[1:6]) + " top"]
    for one in scores:
        row = " ".join(f"{marks[getattr(one, field.name)]:6}" for field in fields(Score)[1:6])
        rows.append(f"{one.name:36} {row} {one.top:10} {one.told}")
    return "\n".join(rows)


if __name__ == "__main__":
    scores = scores_of(Path(sys.argv[1]) if len(sys.argv) > 1 else DRAW)
    print(table(scores))
    print(", ".join(f"{name} {right} of {known}" for name, (right, known) in totals(scores).items()))
