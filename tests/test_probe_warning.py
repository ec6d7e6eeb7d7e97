"Early warning: Page's test against a slow twin, and what a recorder does about a warning."

import json

import numpy as np
import pytest
import torch

from stabilitylab import Recorder
from stabilitylab.names.errors import InputError
from stabilitylab.probe.guard import RECORDING
from stabilitylab.probe.rows import StepRow
from stabilitylab.probe.warning import EarlyWarning, PageTest, WarningDetector
from stabilitylab.run.record import open_run

RATE = 1e-3


def test_sums_agree_with_a_loop_over_single_numbers():
    generator = np.random.default_rng(1)
    values = np.exp(np.cumsum(0.2 * generator.normal(size=(80, 4)), 0))
    values[generator.random(values.shape) < 0.1] = np.nan
    test = PageTest(4)
    sums = np.array([test.update(row, step) for step, row in enumerate(values)])
    for j in range(4):
        level = slope = total = 0.0
        variance, count = 0.09, 0
        for i in range(80):
            if np.isfinite(values[i, j]):
                y = np.log(values[i, j])
                if count == 0:
                    level = y
                else:
                    sd = max(np.sqrt(variance), 0.1)
                    forecast = level + slope
                    error = y - forecast
                    if count >= 3:
                        total = max(0.0, total + error / sd - 1)
                    cut = min(max(error, -2 * sd), 2 * sd)
                    level, slope = forecast + max(0.2, 1 / (count + 1)) * cut, slope + 0.05 * cut
                    variance = 0.9 * variance + 0.1 * cut**2
                count += 1
            assert sums[i, j] == pytest.approx(total, abs=1e-9), (i, j)


def _train(path, on_warning, raised=100.0, steps=70, at=50, see=None, schedule=True, **options):
    "A small model whose rate is raised at a step; the recorder's loop waits for its writer."
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    with Recorder(model, optimizer, path, on_warning=on_warning, snapshot_every=20, **options) as rec:
        for step in range(steps):
            if schedule or step == at:
                optimizer.param_groups[0]["lr"] = RATE * (raised if step >= at else 1)
            x = rec.batch(torch.randn(32, 16))
            (model(x) - x[:, :1]).square().mean().backward()
            if not rec.skip_step:
                optimizer.step()
            optimizer.zero_grad()
            rec.step(0.5)
            if see is not None:
                see(rec, optimizer)
            if step >= at:
                _wait(rec)
    return open_run(path)


def _wait(rec):
    "Until the writer has taken every step, so that a warning is known at the next one."
    import time

    deadline = time.monotonic() + 30
    while not rec.recording.writer.work.empty() and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.01)


def _told(run):
    if "events" not in run.children:
        return []
    events = run["events"]
    return events.event_step.values[events.event_kind.values == "warning"].tolist()


@pytest.mark.slow
def test_a_warning_is_an_event_and_pins_the_state_and_batches_before_it(tmp_path):
    run = _train(tmp_path / "r", "note", keep_snapshots=1, old_snapshots=0, steps=130)
    assert _told(run)[0] == 50
    index = json.loads((tmp_path / "r/blackbox/index.json").read_text())
    pinned = [shot for shot in index["snapshots"] if shot["pinned"]]
    assert pinned[0]["step"] == 40 and pinned[0]["suspect"] == 50
    assert {40, 50} <= {batch["step"] for batch in index["batches"]}


@pytest.mark.slow
def test_a_healthy_run_has_no_warning_and_none_is_watched_by_default(tmp_path):
    assert _told(_train(tmp_path / "a", "note", raised=1.0)) == []
    assert _told(_train(tmp_path / "b", None)) == []


@pytest.mark.slow
def test_stop_raises_in_the_loop_and_the_record_is_whole(tmp_path):
    with pytest.raises(RuntimeError, match="warning of step 50"):
        _train(tmp_path / "r", "stop")
    run = open_run(tmp_path / "r")
    assert _told(run) == [50] and 50 <= run["scalars"].step.values[-1] <= 53


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [True, False])
def test_a_cut_rate_stays_cut_and_the_schedule_does_not_see_it(tmp_path, schedule):
    seen = []
    run = _train(
        tmp_path / "r",
        "cut_rate",
        schedule=schedule,
        see=lambda rec, optimizer: seen.append(optimizer.param_groups[0]["lr"]),
    )
    told, lr = _told(run), run["scalars/lr"].values
    assert lr[50] == pytest.approx(100 * RATE) and lr[-1] == pytest.approx(100 * RATE * 0.5 ** len(told))
    assert seen[-1] == pytest.approx(100 * RATE)


@pytest.mark.slow
def test_a_cut_rate_is_in_the_settings_that_a_replay_reads(tmp_path):
    _train(tmp_path / "r", "cut_rate")
    rows = json.loads((tmp_path / "r/blackbox/index.json").read_text())["settings"]
    assert rows[-1]["optimizers"][0][0]["lr"] == pytest.approx(100 * RATE * 0.5)


@pytest.mark.slow
def test_skip_leaves_one_step_out_for_each_warning(tmp_path):
    run = _train(tmp_path / "r", "skip")
    skipped = run["scalars/step"].values[run["scalars/skipped"].values > 0]
    assert len(skipped) == len(_told(run)) and 51 <= skipped[0] <= 53


def test_a_recording_that_stops_after_a_warning_asks_for_no_more_skipped_steps(tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "r", on_warning="skip") as rec:
        asked = []
        for step in range(4):
            model(torch.ones(1, 2)).sum().backward()
            if step == 1:
                warning = EarlyWarning(1, 1, "loss", "", 2.0, 1.0, 1.5)
                rec.recording.watch.waiting.append(warning)
            if step == 2:
                rec.guard.failed(RECORDING, None, "the disk is gone")
            rec.step(0.5)
            asked.append(rec.skip_step)
    assert asked == [False, True, False, False]


@pytest.mark.slow
def test_a_function_may_choose_and_one_that_fails_does_not_reach_the_loop(tmp_path):
    told = []
    with pytest.raises(RuntimeError):
        _train(tmp_path / "a", lambda warning: told.append(warning) or "stop")
    assert told[0].step == 50 and "update" in told[0].words()
    with pytest.warns(UserWarning, match="early warning"):
        run = _train(tmp_path / "b", lambda warning: 1 / 0)
    assert len(run["scalars"].step) == 70


def test_an_unknown_action_is_refused(tmp_path):
    with pytest.raises(InputError, match="cut_rate"):
        Recorder(torch.nn.Linear(1, 1), None, tmp_path / "r", on_warning="panic")


def test_more_series_raise_the_limit():
    few, many = (
        WarningDetector({"module": [], "param": ["a"]}),
        WarningDetector({"module": [], "param": [str(i) for i in range(100_000)]}),
    )
    noise = np.exp(0.1 * np.random.default_rng(0).normal(size=(40, 1)))
    noise[30:] *= 56
    for detector, width, is_told in ((few, 1, True), (many, 100_000, False)):
        told = []
        for step in range(31):
            column = {"gradients/grad_norm": np.repeat(noise[step], width)}
            told.append(detector.see(StepRow(step, 0.0, column, {"update_norm": 1.0}, {}, None, None)))
        assert any(told) is is_told


@pytest.mark.slow
def test_attention_logits_of_each_head_are_watched(tmp_path):
    from stabilitylab.models.decoder import LanguageModel
    from stabilitylab.models.parts import ModelConfig

    torch.manual_seed(0)
    model = LanguageModel(ModelConfig.plain(vocab=16, seq=8, d_model=16, n_layer=2, n_head=2))
    optimizer, told = torch.optim.AdamW(model.parameters(), lr=1e-5), []
    with Recorder(model, optimizer, tmp_path / "r", on_warning=told.append, attention_every=1) as rec:
        for step in range(14):
            if step == 10:
                with torch.no_grad():
                    model.get_parameter("blocks.1.attn.q_proj.weight").mul_(1e6)
            tokens = torch.randint(0, 16, (4, 8))
            loss = model(tokens, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.step(loss)
            _wait(rec)
        watched = rec.recording.watch.detector.tests["attention/attn_logit_max"]
    assert watched.sum.size == 4 and watched.count.min() >= 10 and told[0].step == 10


def _told_of_losses(losses):
    detector = WarningDetector({"module": [], "param": []})
    rows = (
        StepRow(i, 0.0, {}, {"loss": v, "update_norm": 1.0}, {}, None, None) for i, v in enumerate(losses)
    )
    return [(w.step, w.statistic) for w in map(detector.see, rows) if w]


def test_a_jump_of_a_loss_whose_logarithm_is_noisy_is_told_in_its_step():
    "A loss that varies by half from step to step: a value of eight spreads is far outside of all."
    losses = 0.05 * np.exp(0.45 * np.random.default_rng(0).normal(size=80))
    assert _told_of_losses(losses) == []
    losses[60] = losses[:60].mean() + 8 * losses[:60].std()
    assert _told_of_losses(losses)[0] == (60, "loss")


def test_a_loss_without_noise_is_no_jump_until_it_moves_by_more_than_a_rounding():
    losses = np.full(80, 2.0)
    losses[60] += 0.01
    assert _told_of_losses(losses) == []
    losses[60] += 0.2
    assert _told_of_losses(losses) == [(60, "loss")]
    assert _told_of_losses(np.r_[np.zeros(40), 1e-3]) == [(40, "loss")]


def test_within_an_event_only_what_is_much_stronger_is_told_again():
    "An update that rose at step 40 is one event with a loss that follows; one of the tenfold is news."
    noise = np.exp(0.05 * np.random.default_rng(0).normal(size=60))
    steps = {}
    for factor in (1.0, 30.0):
        detector, steps[factor] = WarningDetector({"module": [], "param": ["a"]}), []
        for i, value in enumerate(noise):
            update, loss = value * (8 if i >= 40 else 1), 2 * value * (factor if i == 45 else 1)
            row = StepRow(i, 0.0, {}, {"loss": loss, "update_norm": update}, {}, None, None)
            warning = detector.see(row)
            steps[factor] += [(i, warning.statistic)] if warning else []
    assert steps[1.0] == [(40, "update norm")]
    assert steps[30.0] == [(40, "update norm"), (45, "loss")]
