"""A figure for the page of each symptom: a run with the finding marked; trained by us where we have one.

python tests/docs/figures.py [KIND ...]: writes nbs/images/symptoms/KIND.png, for all kinds or these
"""

import base64
import io
import json
import math
import sys
import tarfile
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import xarray as xr

from stabilitylab.cases.registry import case, cases, sample
from stabilitylab.detect.diagnose import as_run, diagnose
from stabilitylab.detect.findings import Finding, Findings
from stabilitylab.investigation.opening import open_recordings
from stabilitylab.names.words import FINDING_KINDS
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
STATISTICS = {  # kind -> 'group/variable' of a record, drawn below the loss; what it is
    "massive_activation": ("sampled_activations/channel_ratio", "largest channel over the median channel"),
    "overflow": ("activations/absmax", "largest value"),
    "activation_explosion": ("activations/absmax", "largest value"),
    "bad_batch_values": ("activations/in_absmax", "largest input value"),
    "dead_units": ("sampled_activations/zero_frac", "share of zeros in the output"),
    "underflow": ("sampled_activations/grad_underflow_frac", "share of the gradient that rounds to zero"),
    "grad_below_epsilon": ("optimizer/below_eps_frac", "share of the gradient below epsilon"),
    "no_gradient": ("gradients/grad_norm", "gradient norm"),
    "dead_network": ("gradients/grad_norm", "gradient norm"),
    "update_lost_to_rounding": ("sampled_updates/lost_frac", "share of updates lost to rounding"),
    "update_rms_excess": ("optimizer/update_rms", "RMS_t"),
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
    if kind == "init_std_too_large":
        return "The first weights of a small model, beside the published rule."
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
    logs = RUNS[kind][1]()
    with tempfile.TemporaryDirectory() as folder:
        for name, log in (logs if isinstance(logs, dict) else {"run": logs}).items():
            text = log if isinstance(log, str) else "\n".join(json.dumps(row) for row in log)
            (Path(folder) / f"{name}.{'log' if text is log else 'jsonl'}").write_text(text, encoding="utf-8")
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


def with_statistic(run: xr.DataTree, finding: Finding) -> list[str]:
    "Add what the finding measured in its first module to the scalars; the names of both panels."
    path, words = STATISTICS[finding.kind]
    group, name = path.split("/")
    values = run[group][name]
    dim = "module" if "module" in values.dims else "param"
    values = values.isel({dim: 0}) if not finding.modules else values.sel({dim: finding.modules[0]})
    if "format" in values.dims:
        values = values.sel(format=finding.evidence.get("format", "fp16"))
    where = str(values[dim].item())
    steps = run["scalars"].step
    run["scalars"]["statistic"] = values.drop_vars([c for c in values.coords if c != "step"]).reindex(
        step=steps
    )
    run["scalars"]["statistic"].attrs = {"long_name": f"{words}, {where}", "units": "1"}
    return ["loss", "statistic"]


def panels(run: xr.DataTree, finding: Finding) -> list[str]:
    "The series to draw: the usual ones and the finding's own; of a policy that one first, and the reward."
    if finding.kind in STATISTICS:
        return with_statistic(run, finding)
    own = {finding.series, finding.evidence.get("series"), "tokens_per_step", "batch_size"}
    names = [*panels_of(run, Findings([finding])), *sorted(own & set(run["scalars"].data_vars))]
    if "reward" in run["scalars"]:
        names = [finding.series, "reward", names[0]]
    return list(dict.fromkeys(filter(None, names)))


def plot_initial_std(run: xr.DataTree, finding: Finding) -> None:
    "The standard deviations of the first weights of the finding's matrices beside the rule's."
    norms, shapes = run["weights"].weight_norm.isel(step=0), run.attrs["shapes"]
    stds = {name: float(norms.sel(param=name)) / math.prod(shapes[name]) ** 0.5 for name in finding.modules}
    ax = plt.subplots(figsize=(7, 2.6), layout="constrained")[1]
    ax.barh(list(stds), list(stds.values()))
    ax.axvline(finding.evidence["allowed"], color="black", ls="--", lw=1, label="sqrt(2/(5H))")
    ax.invert_yaxis()
    ax.set_xlabel("standard deviation of the first weights")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)


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
        if not marked or marked[0].onset is None:
            return b""
        if kind == "init_std_too_large":
            plot_initial_std(run, marked[0])
        else:
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
