"A log without snapshots: what is taken over from it, when a small model is trained at all, and what is said."

import json

import numpy as np
import pytest

from stabilitylab.detect.findings import Finding
from stabilitylab.read.runs import read_runs
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars
from stabilitylab.trial.proxy import not_shrunk, proxy, symptoms_of
from stabilitylab.trial.settings import recipe_of, settings_in
from tests.command import command


def log_of(lr, loss=None):
    "A record of rates, and of a loss that falls."
    step = np.arange(len(lr))
    loss = 4 - step / len(step) if loss is None else loss
    return new_run(make_scalars({"lr": Samples(step, np.asarray(lr)), "loss": Samples(step, loss)}))


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("  lr ............. 0.00015\n  adam_eps ....... 1e-08\n  bf16 ... True", ("lr", 1.5e-4)),
        ("Namespace(weight_decay=0.01, clip_grad=0.5, num_layers=12)", ("clip", 0.5)),
        ('{"hidden_size": 768, "tie_word_embeddings": false}', ("tied", False)),
        ("| learning rate (LR)    | 6.000000e-04         |", ("lr", 6e-4)),
        ("n_layer: 6\ngrad_clip: 1.0\n", ("n_layer", 6.0)),
        ("max_grad_norm=0.3, lr_scheduler=cosine", ("clip", 0.3)),
    ],
)
def test_settings_of_many_writers(text, known):
    name, value = known
    assert settings_in(text)[name] == value


def test_settings_never_raise_on_strange_text():
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = bytes(rng.integers(0, 256, 300, dtype=np.uint8)).decode("latin-1")
        settings_in(text + "lr=" + text[:5] + ":::===|||'\"")


def test_the_recipe_takes_what_is_known_and_says_what_is_not():
    config = {"num_hidden_layers": 80, "hidden_act": "silu", "rms_norm_eps": 1e-5, "adam_beta2": 0.95}
    known = recipe_of(log_of(np.r_[np.linspace(0, 2e-4, 20), np.full(80, 2e-4)]), config)
    made = known.recipe
    assert (made.n_layer, made.norm, made.activation, made.betas) == (6, "rms", "swiglu", (0.9, 0.95))
    assert made.lr == pytest.approx(2e-4) and made.schedule[0][1] == 0 and made.schedule[-1][1] == 1
    assert {"eps", "clip", "weight_decay", "precision"} <= set(known.assumed)
    assert json.dumps(known.to_dict())


def test_only_what_can_show_in_a_small_model_is_looked_for():
    assert symptoms_of([Finding("crash", "error", 3), Finding("throughput_drop", "warning")]) == ()
    assert symptoms_of([Finding("divergence", "info", 3)]) == ()  # a fact, and no failure
    assert symptoms_of([Finding("non_finite", "error", 3)]) == ("diverged",)
    assert set(not_shrunk([Finding("attention_sink"), Finding("divergence")])) == {"attention_sink"}


@pytest.mark.slow  # trains a ladder of rates
def test_a_rate_that_rises_without_end_shows_and_a_sane_one_does_not():
    found = [Finding("divergence", "error", 70)]
    rising = proxy(log_of(1e-3 * 10 ** (np.arange(100) / 40)), found, steps=120, seeds=3)
    assert rising.shows and rising.start is not None and rising.steps == 120
    assert rising.start.arguments["lr"] == pytest.approx(rising.run_recipe.recipe.lr * rising.times)
    assert any("appears" in sentence for sentence in rising.words)
    assert json.dumps(rising.to_dict()) and len(rising.table()) == len(rising.rungs) >= 1
    sane = proxy(log_of(np.full(100, 1e-6)), found, steps=20, seeds=2)
    assert not sane.shows and sane.start is None and sane.rungs[-1]["times"] == 100
    assert any("does not appear" in sentence for sentence in sane.words)


def test_the_command_says_that_nothing_can_be_tried(tmp_path):
    log = tmp_path / "calm.csv"
    step, rng = np.arange(300), np.random.default_rng(0)
    loss = 2 + 2 * np.exp(-step / 80) + 0.02 * rng.standard_normal(300)
    rows = (f"{at},{value:.5f},0.0003" for at, value in zip(step, loss, strict=True))
    log.write_text("step,loss,lr\n" + "\n".join(rows) + "\n")
    out = command("trial", log, "--json")
    assert out.returncode == 0, out.stderr
    told = json.loads(out.stdout)
    assert told["arms"] == [] and told["start"] is None and "nothing is tried" in told["words"]
    out = command("trial", log, "--fix", "lower_lr", "--step", "5")
    assert out.returncode == 2 and len(out.stderr.strip().splitlines()) == 1


def test_recipes_of_real_logs(real_logs):
    for pattern, name, value in (
        ("megatron_text/*Pier*", "betas", (0.9, 0.999)),
        ("llmc_stdout/*11679031.log", "lr", 6e-4),
    ):
        (file,) = real_logs.glob(pattern)
        known = recipe_of(next(iter(read_runs(file).values())))
        got = known.reported[name]
        assert got == pytest.approx(value), (file.name, known.reported)
