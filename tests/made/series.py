"Short runs made from a seed: a curve, its noise, one event, the other series and the settings, each drawn."

import numpy as np
import xarray as xr

from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars

RUNS = 240  # seeds 0 to 239
LENGTHS = (9, 30, 80, 240, 240, 700, 700, 2500)


def _curve(rng: np.random.Generator, n: int, kind: str) -> np.ndarray:
    "The level of the loss at n records."
    t, low = np.linspace(0, 1, n), rng.uniform(0.5, 3)
    learned = np.exp(-t * rng.uniform(3, 30))
    forms = {
        "learns": low + rng.uniform(1, 8) * learned,
        "stays": np.full(n, rng.choice([np.log(10), np.log(50257), low])),
        "rises_late": low + 4 * learned + rng.uniform(0.1, 3) * np.clip(t - rng.uniform(0.4, 0.9), 0, None),
        "rises": low * (1 + rng.uniform(0.5, 5) * t),
        "near_zero": rng.uniform(0.001, 0.02) * np.exp(-3 * t),
        "sum": rng.uniform(300, 5000) * (0.3 + learned),
        "below_zero": rng.uniform(-2, 0.1) + learned,
        "stops_early": low + 3 * np.exp(-40 * t),
        "sawtooth": low + 3 * np.abs((t * rng.integers(3, 6)) % 1 - 1),
    }
    return forms[kind]


def _noise(rng: np.random.Generator, level: np.ndarray) -> np.ndarray:
    "Noise in proportion to the level: normal, with heavy tails, or correlated."
    n, scale = len(level), np.abs(level) * rng.choice([0.0, 0.003, 0.01, 0.05, 0.2])
    draws = rng.standard_t(2, n) if rng.random() < 0.15 else rng.normal(size=n)
    if rng.random() < 0.2:
        kernel = 0.8 ** np.arange(20)
        draws = np.convolve(draws, kernel / np.linalg.norm(kernel))[:n]
    return scale * draws


def _event(rng: np.random.Generator, loss: np.ndarray, kind: str) -> tuple[np.ndarray, int]:
    "The loss with one event, and the record where it begins."
    n = len(loss)
    at = int(rng.integers(n // 4, max(n // 4 + 1, 9 * n // 10)))
    length = int(rng.choice([1, 2, 6, 25, 120]))
    height = np.abs(loss[at]) * rng.choice([0.1, 0.4, 1.5, 20])
    since = np.arange(n) - at  # records since the event began
    is_after, is_inside = since >= 0, (since >= 0) & (since < length)
    later = np.maximum(since, 0)
    forms = {
        "none": loss,
        "spike": loss + height * is_inside,
        "decays": loss + height * np.exp(-later / length) * is_after,
        "shift": loss + height * is_after,
        "drop": loss - 0.4 * np.abs(loss) * is_after,
        "diverges": loss + height * later / (n - at),
        "explodes": loss * np.exp(np.minimum(later / max(length, 3), 60)),
        "nan": np.where(is_inside, np.nan, loss),
        "dies": np.where(is_after, np.nan, loss),
        "inf": np.where(since == 0, np.inf, loss),
        "zero": np.where(is_after, 0, loss),
        "repeats": np.where(is_after, loss[at], loss),
        "coarse": np.round(loss * 8) / 8,
    }
    return forms[kind], at


CURVES = [
    "learns",
    "learns",
    "learns",
    "stays",
    "rises_late",
    "rises",
    "near_zero",
    "sum",
    "below_zero",
    "stops_early",
    "sawtooth",
]
EVENTS = [
    "none",
    "none",
    "spike",
    "spike",
    "decays",
    "shift",
    "drop",
    "diverges",
    "explodes",
    "nan",
    "dies",
    "inf",
    "zero",
    "repeats",
    "coarse",
]


def _beside(rng: np.random.Generator, loss: np.ndarray, at: int) -> dict[str, np.ndarray]:
    "The other series of a run, each in one of its forms or absent."
    n, t = len(loss), np.linspace(0, 1, len(loss))
    record = np.arange(n)
    after, once = record >= at, record == at

    def held(level: float, sd: float = 0.03) -> np.ndarray:
        return level * np.exp(sd * rng.normal(size=n))

    rate, factor = rng.choice([1e-5, 3e-4, 1e-3, 0.1]), rng.choice([3, 60, 5e3])
    norm = held(rng.choice([0.1, 1.0, 30]), rng.choice([0.02, 0.3]))
    is_number = np.isfinite(loss)
    kept = np.where(is_number, loss, np.median(loss[is_number])) if is_number.any() else np.ones(n)
    shift = np.where(after, factor, 1.0)
    before_event = record == max(0, at - 3)
    forms = {  # name -> (how often it is absent, its forms)
        "lr": (1, np.full(n, rate), rate * np.minimum(1, t * 10) * (1 - t), rate * np.minimum(shift, 60)),
        "grad_norm": (
            1,
            norm,
            norm * (1 + 999 * once),
            norm * shift,
            np.minimum(norm, 1),
            np.where(before_event, np.nan, norm),
        ),
        "val_loss": (1, kept * 1.05, kept + 2 * t, kept * 0.4, kept + after),
        "accuracy": (1, 0.9 * (1 - np.exp(-5 * t)), np.full(n, 0.1)),
        "loss_scale": (5, 2.0 ** (16 - np.floor(16 * t)), np.full(n, 65536.0), np.ones(n)),
        "step_time": (
            2,
            held(0.5),
            held(0.5) + 0.9 * after,
            held(0.5) * (1 + t),
            held(0.5) + 8 * (record % 40 == 7),
        ),
        "memory": (5, held(20, 0.001), 20 + 30 * t, 20 + 15.0 * after),
        "entropy": (7, 2 * np.exp(-9 * t), 1 + t, held(1.0)),
        "reward": (7, t + 0.1 * rng.normal(size=n), np.where(after, -1.0, t), held(0.5)),
        "kl": (7, 0.01 * np.exp(6 * t), held(0.02), np.where(after, 4.0, 0.01)),
        "aux_loss": (3, held(0.01), np.where(after, 0.3, held(0.01)), kept * 0.3),
        "z_loss": (8, held(0.02), 1e-4 * np.exp(-20 * t)),
        "epoch": (2, np.floor(4 * t), 3 * t),
        "throughput": (4, held(1e4), np.where(after, held(4e3), held(1e4))),
        "attn_logit_max": (8, held(8.0), 8 * np.exp(5 * t)),
        "update_norm": (4, held(0.01), np.where(after, 0.8, held(0.01))),
        "skipped": (8, record % 50 == 3, after),
    }
    drawn = {name: int(rng.integers(absent + len(rest))) for name, (absent, *rest) in forms.items()}
    return {name: forms[name][1 + form] * 1.0 for name, form in drawn.items() if form + 1 < len(forms[name])}


def made(seed: int) -> xr.DataTree:
    "The run of one seed."
    rng = np.random.default_rng(seed)
    n = int(rng.choice(LENGTHS))
    level = _curve(rng, n, rng.choice(CURVES))
    loss, at = _event(rng, level + _noise(rng, level), rng.choice(EVENTS))
    interval, first = int(rng.choice([1, 1, 10, 100])), int(rng.choice([0, 0, 0, 0, 50_000]))
    step = interval * np.arange(n) + first
    back = int(rng.choice([0, 0, 0, 5, 40]))  # records that are trained again after a restart
    if back and back < at < n - 5:
        step[at:] -= back * interval
    evaluated = np.arange(n) % rng.choice([1, 1, 10]) == 0
    samples = {}
    with np.errstate(all="ignore"):
        values = {"loss": loss, **_beside(rng, loss, at)}
    for name, value in values.items():
        rows = np.flatnonzero(evaluated if name in ("val_loss", "accuracy") else np.ones(n, bool))
        samples[name] = Samples(step[rows], value[rows], rows)
    attrs = ({}, {"precision": "bf16"}, {"precision": "fp16"}, {"optimizer": "adamw", "grad_clip": 1.0})
    return new_run(make_scalars(samples), attrs=attrs[rng.integers(4)])
