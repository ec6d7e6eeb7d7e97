"Logs as the five notes describe them, with the sizes and steps that a note gives"

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr

from stabilitylab.detect.diagnose import diagnose
from stabilitylab.detect.findings import Findings
from stabilitylab.names.errors import bad_input
from stabilitylab.read.runs import read_runs

Columns = dict[str, np.ndarray]


def _falling(rng: np.random.Generator, step: np.ndarray, low: float = 2.0, noise: float = 0.02) -> np.ndarray:
    "A loss that falls from 8 within some hundred steps and then hardly."
    return low + (8 - low) * np.exp(-step / 150) + rng.normal(0, noise, step.size)


def _joined(parts: list[Columns]) -> Columns:
    "Columns one behind the other."
    frame = pd.concat([pd.DataFrame(part) for part in parts])
    return {str(name): frame[name].to_numpy() for name in frame}


def _early_divergence(rng: np.random.Generator) -> Columns:
    "New parts in a frozen stack: the loss falls, turns and rises, early."
    step = np.arange(1200)
    return {"step": step, "loss": _falling(rng, step) + np.clip((step - 500) / 150, 0, 4)}


def _spike(rng: np.random.Generator, heals: bool) -> Columns:
    "A spike that falls back within tens of steps, or one after which the loss stays up."
    step = np.arange(3000)
    since = np.clip(step - 2000, 0, None)
    after = np.exp(-since / 15) if heals else np.minimum(1, 0.7 + since / 400)
    return {"step": step, "loss": _falling(rng, step) + np.where(step >= 2000, 2.0 * after, 0)}


def _z_loss_dips(rng: np.random.Generator) -> Columns:
    "Three spikes; at two of them the z-loss falls."
    step = np.arange(3000)
    loss, z_loss = _falling(rng, step), 20 + rng.normal(0, 0.3, step.size)
    for at, dips in ((1200, True), (1800, False), (2400, True)):
        shape = np.exp(-np.clip(step - at, 0, None) / 10) * (step >= at)
        loss, z_loss = loss + 1.5 * shape, z_loss - 18 * shape * dips
    return {"step": step, "loss": loss, "z_loss": z_loss}


def _plateau(rng: np.random.Generator) -> Columns:
    "39,000 steps: pairs go on falling slowly behind 15,000, web documents stand still."
    step = np.arange(0, 39_000, 25)
    fall = np.where(step < 15_000, 3 * (1 - step / 15_000) ** 2, 0.0)
    pairs = 2.2 + fall - 3e-6 * np.clip(step - 15_000, 0, None) + rng.normal(0, 0.02, step.size)
    documents = 2.0 + fall + rng.normal(0, 0.02, step.size)
    mean = (pairs + documents) / 2
    losses = {"loss": mean, "image_pairs_loss": pairs, "web_documents_loss": documents}
    score = np.where(
        step % 500 == 0, 0.4 * (1 - np.exp(-step / 3000)) + rng.normal(0, 0.004, step.size), np.nan
    )
    return {"step": step, **losses, "vqa_accuracy": score}


def _added_data(rng: np.random.Generator) -> Columns:
    "Fine-tuning with everything unfrozen: the old datasets stand still, the added one falls."
    step = np.arange(2000)
    pairs, documents = (2.0 + rng.normal(0, 0.02, step.size) for _ in range(2))
    added = 1.2 + 2 * np.exp(-step / 500) + rng.normal(0, 0.02, step.size)
    losses = {"image_pairs_loss": pairs, "web_documents_loss": documents, "instructions_loss": added}
    return {"step": step, "loss": (pairs + documents + added) / 3, **losses}


def _pairs_only(rng: np.random.Generator) -> Columns:
    "The loss falls while answers to questions get worse."
    step = np.arange(10_000)
    score = 0.5 * (1 - np.exp(-step / 800)) - 0.15 * np.clip((step - 2500) / 7500, 0, 1)
    answered = np.where(step % 250 == 0, score + rng.normal(0, 0.004, step.size), np.nan)
    return {
        "step": step,
        "loss": 2 + 3 * np.exp(-step / 3000) + rng.normal(0, 0.02, step.size),
        "vqa_accuracy": answered,
    }


def _more_skips(rng: np.random.Generator) -> Columns:
    "Steps with a norm spike are left out, and there are more and more of them."
    step = np.arange(4000)
    skipped = (rng.random(step.size) < 0.15 * step / 4000).astype(float)
    return {"step": step, "loss": _falling(rng, step), "skipped": skipped}


def _one_dataset_spikes(rng: np.random.Generator) -> Columns:
    "A spike of one dataset of ten, which the mean hides."
    step = np.arange(2000)
    code = _falling(rng, step) + np.where((step >= 1200) & (step < 1203), 1.5, 0)
    text = _falling(rng, step)
    return {
        "step": step,
        "loss": (19 * text + code) / 20 + rng.normal(0, 0.02, 2000),
        "text_loss": text,
        "code_loss": code,
    }


def _raised_rate(rng: np.random.Generator) -> Columns:
    "The learning rate is doubled at step 29,000, for 1,000 steps; the loss is higher while it lasts."
    step = np.arange(20_000, 39_000, 10)
    is_raised = (step >= 29_000) & (step < 30_000)
    lr = 1e-5 * np.where(is_raised, 2.0, 1.0)
    return {"step": step, "loss": 2.0 + 0.15 * is_raised + rng.normal(0, 0.02, step.size), "lr": lr}


def _rollbacks(rng: np.random.Generator) -> Columns:
    "Eleven rollbacks: the loss leaves, the run goes back 500 steps, with a lower rate at every third."
    parts, first, rate = [], 0, 5e-5
    for attempt in range(12):
        last = 2000 + 1500 * attempt
        step = np.arange(first, last)
        rise = np.clip(step - (last - 60), 0, None) / 20 if attempt < 11 else 0.0
        loss = _falling(rng, step) + rise
        parts.append({"step": step, "loss": loss, "lr": np.full(step.size, rate)})
        first, rate = last - 500, rate * (0.75 if attempt % 3 == 2 else 1.0)
    return _joined(parts)


def _resume_bumps(rng: np.random.Generator) -> Columns:
    "After every resume the share of image tokens is low for 50 steps and the loss of pairs high."
    parts, first = [], 0
    for attempt in range(5):
        step = np.arange(first, 1000 * (attempt + 1))
        low = np.exp(-(step - first) / 20) * (attempt > 0)
        pairs = _falling(rng, step) + 0.5 * low
        documents = _falling(rng, step)
        ratio = 0.5 - 0.2 * low + rng.normal(0, 0.005, step.size)
        losses = {"loss": (pairs + documents) / 2, "image_pairs_loss": pairs, "web_documents_loss": documents}
        parts.append({"step": step, **losses, "image_to_text_ratio": ratio})
        first = 1000 * (attempt + 1) - 100
    return _joined(parts)


def _eleven_losses(rng: np.random.Generator) -> Columns:
    "A loss that was rounded to bf16 before it was printed."
    step = np.arange(600)
    loss = torch.tensor(1.6953 + rng.normal(0, 0.02, step.size)).clamp(1.6562, 1.7344).bfloat16()
    return {"step": step, "per_token_loss": loss.double().numpy().round(4)}


def _steps_of(seconds: float) -> Callable[[np.random.Generator], Columns]:
    "A run whose steps take so long."

    def columns(
        rng: np.random.Generator,  # source of the noise
    ) -> Columns:
        "The run."
        step = np.arange(600)
        return {"step": step, "loss": _falling(rng, step), "step_time": seconds * rng.lognormal(0, 0.03, 600)}

    return columns


def _growing_norm(rng: np.random.Generator) -> Columns:
    "The gradient norm grows ten-thousandfold over 2,000 steps; the loss leaves at their end."
    step = np.arange(4000)
    growth = np.clip((step - 1500) / 2000, 0, 1)
    norm = 0.5 * 10 ** (4 * growth) * rng.lognormal(0, 0.1, step.size)
    return {"step": step, "loss": _falling(rng, step) + np.clip((step - 3500) / 100, 0, 4), "grad_norm": norm}


def _clip_calms(rng: np.random.Generator) -> Columns:
    "Spikes of the gradient norm end with a lower clip at step 2,000, and are back from 4,500 to 5,500."
    step = np.arange(6000)
    spikes = (step % 250 == 0) & ((step < 2000) | ((step >= 4500) & (step <= 5500))) & (step > 0)
    norm = np.where(spikes, 60.0, 0.8) * rng.lognormal(0, 0.1, step.size)
    clip = np.where(step < 2000, 2.5, 1.5)
    return {"step": step, "loss": _falling(rng, step), "grad_norm": norm, "clip": clip}


def _norm_spike(rng: np.random.Generator) -> Columns:
    "Pure bf16: a gradient norm of 9,000 once; it is clipped, and the loss stays higher."
    step = np.arange(2000)
    norm = 0.8 * rng.lognormal(0, 0.1, step.size)
    norm[1400] = 9000.0
    loss = _falling(rng, step) + np.where(step > 1400, 0.8, 0.0)
    return {"step": step, "loss": loss, "grad_norm": norm, "clip": np.ones(step.size)}


def _scale_floor(rng: np.random.Generator) -> Columns:
    "An fp16 loss scale that is halved again and again, down to metaseq's floor."
    step = np.arange(1500)
    halvings = np.clip((step - 1200) // 8, 0, 21)
    norm = 0.5 * rng.lognormal(0, 0.1, step.size) * np.exp(np.clip((step - 1150) / 40, 0, 8))
    return {
        "step": step,
        "loss": _falling(rng, step),
        "loss_scale": np.exp2(16.0 - halvings),
        "grad_norm": norm,
    }


def _escapes(rng: np.random.Generator) -> Columns:
    "Escape characters get into the training data at step 1,200: they are guessed, and clean text is not."
    step = np.arange(2000)
    clean = np.where(step % 50 == 0, _falling(rng, step), np.nan)
    return {"step": step, "loss": _falling(rng, step) - 1.2 * (step >= 1200), "val_loss": clean}


def _stopped_weight_decay(rng: np.random.Generator) -> Columns:
    "A loss that stands still once the weight decay is ten times as high."
    step = np.arange(3000)
    return {
        "step": step,
        "loss": _falling(rng, np.minimum(step, 700)) + 0.0,
        "weight_decay": np.where(step < 700, 0.01, 0.1),
    }


_CURVES: dict[str, Callable[[np.random.Generator], Columns]] = {  # name -> columns of its log
    "diverges early": _early_divergence,
    "a spike that heals": lambda rng: _spike(rng, heals=True),
    "a spike that stays": lambda rng: _spike(rng, heals=False),
    "z-loss dips": _z_loss_dips,
    "flat from step 15,000": _plateau,
    "rate raised at 29,000": _raised_rate,
    "eleven rollbacks": _rollbacks,
    "a bump at every resume": _resume_bumps,
    "eleven losses": _eleven_losses,
    "multithreading on": _steps_of(5.0),
    "multithreading off": _steps_of(0.5),
    "gradients grow": _growing_norm,
    "a norm of 9,000": _norm_spike,
    "clipping calms": _clip_calms,
    "loss scale at its floor": _scale_floor,
    "escape characters": _escapes,
    "more weight decay": _stopped_weight_decay,
    "added data": _added_data,
    "pairs only": _pairs_only,
    "more and more skips": _more_skips,
    "one dataset spikes": _one_dataset_spikes,
}

_XID = "{when} ip-10-0-0-{node} kernel: [{up}] NVRM: Xid (PCI:0000:{slot}:1c): {code}, pid=1850, {text}"
_LINES = {  # name -> what stands between two steps
    "Xid 63": _XID.format(
        when="May 19 07:08:57",
        node=7,
        up="680111.6",
        slot=10,
        code=63,
        text="Row Remapper: New row marked for remapping",
    ),
    "Xid 64": _XID.format(
        when="May 29 01:37:38", node=9, up="257087.8", slot=90, code=64, text="Row remapper error"
    ),
    "Xid 64 at a spike": _XID.format(
        when="May 29 01:37:38", node=9, up="257087.8", slot=90, code=64, text="Row remapper error"
    ),
    "a CUDA error": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "an NCCL error": "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:1269, unhandled cuda error",
    "a lost GPU": _XID.format(
        when="Nov 21 03:12:01", node=3, up="91811.2", slot="3b", code=79, text="GPU has fallen off the bus."
    ),
    "a storage fault": "OSError: [Errno 5] Input/output error: '/mnt/blob/checkpoint_1500.pt'",
    "minimum loss scale": "FloatingPointError: Minimum loss scale reached (0.0001).",
}


def _console(name: str, rng: np.random.Generator) -> str:
    "Steps in the form of nanoGPT, with a line of the machine after two thirds."
    step = np.arange(900)
    loss = _falling(rng, step)
    if name.endswith("at a spike"):
        loss = loss + 2 * np.exp(-np.clip(step - 610, 0, None) / 10) * (step >= 610)
    lines = [f"iter {step}: loss {value:.4f}, time 500.00ms, mfu 31.20%" for step, value in enumerate(loss)]
    lines.insert(601, _LINES[name])
    return "\n".join(lines[:602] if name[0].islower() else lines) + "\n"


def note_logs() -> list[str]:  # names for `write_note_log`
    "The logs that the notes tell of."
    return [*_CURVES, *_LINES]


def write_note_log(
    name: str,  # one of `note_logs()`
    folder: str | Path,  # where the log is put
    seed: int = 0,  # of the noise
) -> Path:  # the file
    "A log as a note tells it: lines of JSON, or a console with a message of the machine."
    if name not in note_logs():
        raise bad_input("name", name, ", ".join(note_logs()))
    rng = np.random.default_rng([seed, *map(ord, name)])
    if name in _LINES:
        path, text = Path(folder) / "train.log", _console(name, rng)
    else:
        columns = pd.DataFrame(_CURVES[name](rng))
        path, text = Path(folder) / "metrics.jsonl", columns.to_json(orient="records", lines=True)
    path.write_text(text, encoding="utf-8")
    return path


_FOLDERS: list[tempfile.TemporaryDirectory] = []  # of the logs that were asked for; gone when Python ends


@cache
def note_file(
    *names: str,  # of `note_logs()`; several: each in a folder of its own
) -> Path:  # the file; of several the folder that holds them
    "Logs of the notes, written into a folder that is removed when Python ends."
    _FOLDERS.append(tempfile.TemporaryDirectory())
    top = Path(_FOLDERS[-1].name)
    if len(names) == 1:
        return write_note_log(names[0], top)
    for name in names:
        (top / name).mkdir()
        write_note_log(name, top / name)
    return top


def note_log(
    name: str,  # one of `note_logs()`
    **attrs: Any,  # attributes of the record, such as `environment`
) -> xr.DataTree:  # the record that the reader returns
    "The record of a log described in the notes, written to a file and read back."
    (run,) = read_runs(note_file(name)).values()
    run.attrs |= attrs
    return run


@cache
def note_findings(
    name: str,  # one of `note_logs()`
) -> Findings:
    "All findings in one of the logs described in the notes."
    return diagnose(note_log(name))


def finds(
    name: str,  # one of `note_logs()`
    kind: str,  # a finding kind
) -> Findings:  # empty if none is detected
    "The findings of one kind in one of the logs described in the notes."
    return note_findings(name).of(kind)
