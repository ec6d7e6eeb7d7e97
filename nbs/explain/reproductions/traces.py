"""Seeded curves whose spikes are known, to count what a rule finds and misses"""

from typing import NamedTuple

import numpy as np
import pandas as pd

from stabilitylab.detect.loss.spike_rules import RULES, event_onsets


class Trace(NamedTuple):
    "A synthetic loss curve and the records at which events were planted."

    kind: str  # what was planted
    value: np.ndarray  # (n,) float64
    onsets: tuple  # records at which an event begins; () for a healthy curve


def _healthy_loss(rng: np.random.Generator, n: int) -> np.ndarray:
    "A healthy falling loss with noise."
    low, high = rng.uniform(1.5, 3), rng.uniform(5, 11)
    fall = (high - low) * np.exp(-np.arange(n) / rng.uniform(60, 500))
    return low + fall + rng.normal(0, rng.uniform(0.01, 0.04), n)


_WITHOUT = {  # kind -> (generator, healthy loss x, record numbers i) -> a curve without an event
    "healthy": lambda rng, x, i: x,
    "steep descent": lambda rng, x, i: 2 + 9 * np.exp(-i / 40) + rng.normal(0, 0.02, i.size),
    "warm restarts": lambda rng, x, i: (
        x + 0.15 * (1 - np.exp(-(i % 750) / 30)) * (1 - (i % 750) / 750) * (i > 750)
    ),
    "learning-rate decay": lambda rng, x, i: x - 0.3 * np.clip((i - 0.8 * i.size) / (0.2 * i.size), 0, 1),
    "noisy microbatches": lambda rng, x, i: x + 0.08 * rng.standard_t(8, i.size),
    "correlated noise": lambda rng, x, i: (
        x + np.convolve(rng.normal(0, 0.03, i.size), 0.6 ** np.arange(20))[: i.size]
    ),
    "heavy tails": lambda rng, x, i: x + 0.02 * rng.standard_t(4, i.size),
    "power law": lambda rng, x, i: 1.7 + 8 * (1 + i / 20) ** -0.4 + rng.normal(0, 0.03, i.size),
    "step decay": lambda rng, x, i: x - 0.2 * (i > i.size // 3) - 0.15 * (i > 2 * i.size // 3),
    "shrinking noise": lambda rng, x, i: x + rng.normal(0, 0.2, i.size) * np.exp(-i / 400),
}


_SHAPES = {  # kind -> (height, shape of the event over the records after its onset)
    "single step +0.4": lambda t: 0.4 * (t == 0),
    "decaying +1.5": lambda t: 1.5 * np.exp(-t / 12),
    "long +0.25": lambda t: 0.25 * (t < 300),
    "slow decay +3": lambda t: 3 * np.exp(-t / 150),
    "divergence": lambda t: np.minimum(0.02 * t, 4) * (t >= 0) + 0.35,
}

_LATER = {  # shapes that no rule was tuned on
    "two records +0.8": lambda t: 0.8 * ((t >= 0) & (t < 2)),
    "ramp to +1": lambda t: np.minimum(t / 10, 1) * np.exp(-np.maximum(t - 10, 0) / 40),
    "flat +0.6": lambda t: 0.6 * (t < 60),
    "burst": lambda t: np.exp(-t / 20) * (t % 3 == 0),
}
_ONCE = ("divergence", "slow decay +3")  # shapes after which there is no room for another
_LASTING = (*_ONCE, "long +0.25")  # shapes during which a rule may speak again


def make_trace(
    kind: str,  # one of KINDS or HELD_OUT
    seed: int = 0,  # the same seed gives the same trace
    n: int = 3000,  # records, > 1500
) -> Trace:  # the trace
    "One loss curve with planted events."
    rng = np.random.default_rng([seed, sum(map(ord, kind))])
    loss, i = _healthy_loss(rng, n), np.arange(n)
    if kind in _WITHOUT:
        return Trace(kind, _WITHOUT[kind](rng, loss, i), ())
    candidates = np.arange(600, n - 700, 400)
    onsets = sorted(rng.choice(candidates, 1 if kind in _ONCE else 3, replace=False).tolist())
    for onset in onsets:
        loss[onset:] += (_SHAPES | _LATER)[kind](i[: n - onset])
    return Trace(kind, loss, tuple(onsets))


HELD_OUT = (*_LATER, "correlated noise", "heavy tails", "power law", "step decay", "shrinking noise")

KINDS = (*_SHAPES, "healthy", "steep descent", "warm restarts", "learning-rate decay", "noisy microbatches")


def _is_near(after: np.ndarray, within: int) -> np.ndarray:
    "Whether events so long after an onset belong to it; a rule's window has width: two records early count."
    return (after >= -2) & (after <= within)


def _counts(trace: Trace, flags: np.ndarray, within: int) -> dict[str, int]:
    "Planted and detected events of one trace."
    events = event_onsets(flags)
    lasting = 600 if trace.kind in _LASTING else 60
    after = np.subtract.outer(
        np.array(events, float), np.array(trace.onsets, float)
    )  # (event, onset) records
    detected = _is_near(after, within).any(0)
    true = _is_near(after, lasting).any(1)
    return {
        "planted": len(trace.onsets),
        "found": int(detected.sum()),
        "events": len(events),
        "true": int(true.sum()),
        "false_on_healthy": 0 if trace.onsets else len(events),
    }


def score_rules(
    seeds: int = 5,  # number of traces of each kind
    within: int = 20,  # an event this many records after an onset at most counts as a detection
    kinds: tuple = KINDS,  # kinds of `make_trace`; no rule was tuned on those in HELD_OUT
    first: int = 0,  # first seed
) -> pd.DataFrame:  # per rule: planted, found, events, true, precision, recall, false_on_healthy, source
    "Precision and recall of every spike rule on the labelled traces."
    traces = [make_trace(kind, seed) for kind in kinds for seed in range(first, first + seeds)]
    rows = {}
    for name, rule in RULES.items():
        of_each = pd.DataFrame([_counts(trace, rule.flags(trace.value), within) for trace in traces])
        total = {what: int(count) for what, count in of_each.sum().items()}
        healthy = total.pop("false_on_healthy")
        rows[name] = total | {
            "precision": total["true"] / total["events"] if total["events"] else np.nan,
            "recall": total["found"] / total["planted"],
            "false_on_healthy": healthy,
            "source": rule.source,
        }
    return pd.DataFrame.from_dict(rows, orient="index")
