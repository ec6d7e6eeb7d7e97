"""A figure for the page of each symptom: a run with the finding marked; trained by us where we have one.

python tests/docs/figures.py [KIND ...]: writes nbs/images/symptoms/KIND.png, for all kinds or these
"""

import base64
import io
import json
import sys
import tarfile
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import xarray as xr

from stabilitylab.cases.registry import case, cases
from stabilitylab.cases.samples import sample
from stabilitylab.detect.diagnose import as_run, diagnose
from stabilitylab.detect.findings import Finding, Findings
from stabilitylab.investigation.opening import open_recordings
from stabilitylab.names.findings import FINDING_KINDS
from stabilitylab.plot.findings import panels_of, plot_findings
from stabilitylab.plot.runs import plot_losses
from stabilitylab.read.runs import read_runs
from tests.docs.trainings import RUNS
from tests.notebooks import small_picture

ROOT = Path(__file__).resolve().parents[2]
FOLDER, RECORDS = ROOT / "nbs" / "images" / "symptoms", ROOT / "tests" / "zoo" / "records"
SAMPLE = "lm_high_lr"
SEEDS = 3  # of a case, until `diagnose` finds what it was made for
_RATE = "A small language model whose learning rate grew tenfold every 150 steps"
TRAINED = {  # kind -> a run that we trained, or the sample; what was done to it
    "loss_spike": ("rnn labels", "A recurrent network with one batch of wrong labels"),
    "divergence": (SAMPLE, _RATE),
    "grad_norm_explosion": ("rnn unclipped", "A recurrent network with wide recurrent weights, not clipped"),
    "lr_jump": ("lstm raised", "An LSTM whose learning rate was raised at once"),
    "lr_too_high": (SAMPLE, _RATE),
    "attention_logit_growth": (SAMPLE, _RATE),
    "activation_explosion": ("conv flip", "A convolutional network in which one bit of a weight was flipped"),
    "not_learning": ("conv dead", "A convolutional network with a bias that closes its units"),
    "expert_collapse": ("moe cold", "A mixture of experts without warm-up"),
    "token_imbalance": ("lstm tokens", "An LSTM with micro-batches of uneven length"),
}
DRAWN = {  # kind -> the page with its figure, the number of the figure there, and what it shows
    "accumulation_bias": (
        "explain/accumulation_is_not_batch_size",
        0,
        "The weight of a token where losses of micro-batches are averaged, and the one it should have",
    ),
    "attention_sink": (
        "explain/attention_sinks",
        0,
        "The attention of a trained head with a sink, and without",
    ),
    "layer_ignored": (
        "explain/attention_layers",
        0,
        "How much the loss of a small model rises without each of its layers",
    ),
    "quantized_loss": ("explain/eleven_values", 0, "A loss as it was logged in bf16, and as it was"),
}


def caption(kind: str) -> str:
    "What the figure of a kind shows."
    if kind in DRAWN:
        return f"{DRAWN[kind][2]}."
    if kind in TRAINED:
        return f"{TRAINED[kind][1]}, as `diagnose` marks it."
    if kind in RUNS:
        return f"{RUNS[kind][0]}, as `diagnose` marks it."
    written = set(cases(kind).source) <= {"written log", "several logs"}
    made = "A log written" if written else "A small model trained"
    return f"{made} to show this, as `diagnose` marks it."


def drawn(page: str, number: int) -> bytes:
    "A figure of a page."
    cells = json.loads((ROOT / "nbs" / f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    pictures = [data["image/png"] for data in outputs if "image/png" in data]
    return base64.b64decode("".join(pictures[number]))


def trained(name: str, kind: str) -> tuple[xr.DataTree, list]:
    "A run that we trained, and its findings of a kind."
    with tempfile.TemporaryDirectory() as folder:
        if name == SAMPLE:
            folder = sample(name)
        else:
            with tarfile.open(RECORDS / f"{name.replace(' ', '_')}.tar.xz") as archive:
                archive.extractall(folder, filter="data")
        (recording,) = open_recordings(str(folder)).values()
        run = recording.run.load()
        return run, [f for f in diagnose(recording) if f.kind == kind]


def short(kind: str) -> dict[str, xr.DataTree]:
    "The short training of a kind, made anew; two runs where it takes two."
    rows = RUNS[kind][1]()
    with tempfile.TemporaryDirectory() as folder:
        for name, run in (rows if isinstance(rows, dict) else {"run": rows}).items():
            lines = "\n".join(json.dumps(row) for row in run)
            (Path(folder) / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        return {Path(name).stem: run.load() for name, run in read_runs(folder).items()}


def made(kind: str) -> tuple[xr.DataTree | None, list]:
    "A case of a kind that is one run, and its findings of that kind."
    for name in cases(kind).sort_values("seconds").index:
        for seed in range(SEEDS):
            run = case(name, seed)
            if not isinstance(run, xr.Dataset | xr.DataTree):
                break
            marked = [f for f in diagnose(as_run(run)) if f.kind == kind]
            if marked:
                return as_run(run), marked
    return None, []


def marked_run(kind: str) -> tuple[xr.DataTree | None, list]:
    "The run that shows a kind best, and its findings of that kind."
    if kind in TRAINED:
        return trained(TRAINED[kind][0], kind)
    if kind not in RUNS:
        return made(kind)
    (run,) = short(kind).values()
    return run, [f for f in diagnose(run) if f.kind == kind]


def panels(run: xr.DataTree, finding: Finding) -> list[str]:
    "The series to draw: the usual ones and the finding's own; of a policy that one first, and the reward."
    names, own = panels_of(run, Findings([finding])), [finding.series] if finding.series else []
    own += [name for name in ("tokens_per_step",) if name in run["scalars"]]
    if "reward" in run["scalars"]:
        return list(dict.fromkeys([*own, "reward", *names[:1]]))
    return list(dict.fromkeys([*names, *own]))


def figure(kind: str) -> bytes:
    "The PNG of a kind; b'' where the finding does not stand in a curve."
    if kind in DRAWN:
        return drawn(*DRAWN[kind][:2])
    if kind == "data_driven_spike":
        runs = short(kind)
        rows = plt.subplots(len(runs), figsize=(7, 2 * len(runs)), sharex=True, layout="constrained")[1]
        for ax, name in zip(rows, runs, strict=True):
            plot_losses(runs, hidden=set(runs) - {name}, ax=ax)
            ax.label_outer()
    else:
        run, marked = marked_run(kind)
        if not marked:
            return b""
        plot_findings(run, Findings(marked[:1]), names=panels(run, marked[0]))
    out = io.BytesIO()
    plt.gcf().savefig(out, dpi=110, bbox_inches="tight")
    plt.close("all")
    return base64.b64decode(small_picture(base64.b64encode(out.getvalue()).decode()))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for kind in sys.argv[1:] or FINDING_KINDS:
        try:
            picture = figure(kind)
        except Exception as error:  # a run without a loss has no curve
            print(f"{kind}: {error!r}"[:150])
            continue
        if picture:
            (FOLDER / f"{kind}.png").write_bytes(picture)
        print(f"{kind}: {len(picture):,} bytes", flush=True)
