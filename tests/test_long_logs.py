"""Logs too long for memory: thinned, they hold what happened to the run, and say what was left out."""

import json

import numpy as np
import pytest

from stabilitylab.detect.diagnose import diagnose
from stabilitylab.read import columns, table_files, text
from stabilitylab.read.runs import read_runs
from stabilitylab.report.terminal import run_json, run_text
from stabilitylab.run.scalars import series

N = 200_000


def healthy(rng: np.random.Generator) -> np.ndarray:
    "A loss that falls as a power of the step, with noise."
    return 2 + 4 / (1 + np.arange(N) / 500) ** 0.5 + rng.normal(0, 0.02, N)


def spike(loss: np.ndarray) -> None:
    "A jump that comes back within 400 steps."
    loss[30_001:30_401] += 2 * np.exp(-np.arange(400) / 80)


def single(loss: np.ndarray) -> None:
    "One record far above."
    loss[41_113] += 3


def divergence(loss: np.ndarray) -> None:
    "A loss that rises from step 190,001 on."
    loss[190_001:] += np.minimum(np.exp(np.arange(N - 190_001) / 1000) - 1, 60)


def nans(loss: np.ndarray) -> None:
    "NaN from step 45,003 on."
    loss[45_003:] = np.nan


def infinite_once(loss: np.ndarray) -> None:
    "One record that is not finite."
    loss[20_007] = np.inf


def shift(loss: np.ndarray) -> None:
    "An abrupt fall that stays."
    loss[35_001:] -= 0.6


FAILURES = [spike, single, divergence, nans, infinite_once, shift, lambda loss: None]


def log_of(loss: np.ndarray, steps: np.ndarray | None = None) -> str:
    "Lines as nanoGPT prints them."
    steps = np.arange(len(loss)) if steps is None else steps
    return "".join(
        f"iter {s}: loss {v:.4f}, time 92.59ms, mfu 0.34%\n" for s, v in zip(steps, loss, strict=True)
    )


@pytest.fixture
def bounded(monkeypatch):
    "Columns that hold few values."
    monkeypatch.setattr(columns, "_MAX_VALUES", 120_000)


def both(path, monkeypatch):
    "The run whole and thinned."
    (whole,) = read_runs(path).values()
    monkeypatch.setattr(columns, "_MAX_VALUES", 120_000)
    (thinned,) = read_runs(path).values()
    assert thinned["scalars"].sizes["step"] < whole["scalars"].sizes["step"] / 4
    return whole, thinned


def sparse_log(folder, loss, width):
    "The log of a program that prints a record every `width` steps."
    path = folder / "sparse" / "train.log"
    path.parent.mkdir()
    path.write_text(log_of(loss[::width], np.arange(N)[::width]))
    return path


SLOW = [pytest.param(fail, marks=pytest.mark.slow) for fail in FAILURES[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("fail", [spike, *SLOW], ids=lambda fail: fail.__name__.strip("<>"))
def test_a_thinned_log_has_the_findings_of_the_whole(tmp_path, monkeypatch, fail):
    loss = healthy(np.random.default_rng(0))
    fail(loss)
    path = tmp_path / "train.log"
    path.write_text(log_of(loss))
    whole, thinned = both(path, monkeypatch)
    width = thinned["scalars"].attrs["thinned"]
    expected, got = diagnose(whole), diagnose(thinned)
    (sparse,) = read_runs(sparse_log(tmp_path, loss, width)).values()  # the log of fewer records
    kinds = [{(f.kind, f.severity) for f in findings} for findings in (got, expected, diagnose(sparse))]
    assert kinds[1] <= kinds[0] <= kinds[1] | kinds[2]
    for before in expected:
        after = next(f for f in got if f.kind == before.kind)
        assert abs(before.onset - after.onset) <= width, (before, after)
        if before.kind == "non_finite":
            assert before.evidence == after.evidence and (before.onset, before.end) == (
                after.onset,
                after.end,
            )
    report = run_json(thinned, got)
    assert (report["n_steps"], report["first_step"], report["last_step"]) == (N, 0, N - 1)
    assert report["thinned"] == width and "thinned" not in run_json(whole, expected)
    assert f"thinned to a record every {width:,} steps" in " ".join(run_text(thinned, got).split())


def test_the_kept_records_are_records_of_the_log(tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    loss = healthy(rng)
    spike(loss)
    path = tmp_path / "train.log"
    path.write_text(log_of(loss))
    whole, thinned = both(path, monkeypatch)
    kept = thinned["scalars"].to_dataset()
    same = whole["scalars"].to_dataset().sel(step=kept.step)
    assert (kept.loss.values == same.loss.values).all() and kept.loss.min() == whole["scalars"].loss.min()
    assert kept.loss.max() == whole["scalars"].loss.max()


def test_a_restart_and_a_crash_keep_their_step(tmp_path, monkeypatch):
    loss = healthy(np.random.default_rng(2))
    crash = (
        'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\n'
        "RuntimeError: CUDA error: an illegal memory access was encountered\n"
    )
    path = tmp_path / "train.log"
    first, again = log_of(loss[:140_123]), log_of(loss[139_001:], np.arange(139_001, N))
    path.write_text(first + crash + again + crash)
    whole, thinned = both(path, monkeypatch)
    assert [crash["step"] for crash in thinned.attrs["crashes"]] == [140_122, N - 1]
    assert thinned.attrs["crashes"] == whole.attrs["crashes"]
    starts = [
        run["scalars"].step.values[np.flatnonzero(np.diff(run["scalars"].segment.values)) + 1].tolist()
        for run in (whole, thinned)
    ]
    assert starts == [[139_001], [139_001]]


def test_lines_that_count_no_steps_are_not_thinned(tmp_path, bounded):
    path = tmp_path / "train.log"
    path.write_text("".join(f"loss {3 - i / 1e5:.5f} at work\n" for i in range(40_000)))
    (run,) = read_runs(path).values()
    assert run["scalars"].sizes["step"] == 40_000 and "thinned" not in run["scalars"].attrs


def test_series_logged_less_often_stay_whole(tmp_path, bounded):
    loss = healthy(np.random.default_rng(3))
    lines = log_of(loss).splitlines()
    for i in range(0, N, 500):
        lines[i] += f"\nstep {i}: train loss {loss[i]:.4f}, val loss {loss[i] + 0.1:.4f}"
    path = tmp_path / "train.log"
    path.write_text("\n".join(lines) + "\n")
    (run,) = read_runs(path).values()
    scalars = run["scalars"].to_dataset()
    assert scalars.attrs["thinned"] and int(scalars.val_loss.notnull().sum()) == N // 500


def test_a_long_log_reports_its_progress_and_can_be_stopped(tmp_path, monkeypatch):
    path, progress = tmp_path / "train.log", tmp_path / "progress.jsonl"
    path.write_text(log_of(healthy(np.random.default_rng(4))))
    monkeypatch.setattr(text, "_SHOWS_PROGRESS", 1000)
    monkeypatch.setenv("STABILITYLAB_PROGRESS", str(progress))
    read_runs(path)
    events = [json.loads(line) for line in progress.read_text().splitlines()]
    shares = [event["share"] for event in events]
    assert events[0]["words"] == "reading train.log" and len(shares) >= 3
    assert shares == sorted(shares) and 0 <= shares[0] < shares[-1] < 1

    def interrupt(words: str, share: float) -> None:
        if share > 0.3:
            raise KeyboardInterrupt

    monkeypatch.setattr(text, "report_progress", interrupt)
    with pytest.raises(KeyboardInterrupt):
        read_runs(path)


def table_of(loss: np.ndarray, suffix: str) -> str:
    "The same as a table: a validation loss every 500 rows, and a row that nobody can read."
    val = {i: round(float(v) + 0.1, 4) for i, v in enumerate(loss) if i % 500 == 0}
    if suffix == "csv":
        rows = [f"{i},{v:.4f},{val.get(i, '')}" for i, v in enumerate(loss)]
        return "step,loss,val_loss\n" + "\n".join([*rows[:70], "1,2,3,4,5", *rows[70:]]) + "\n"
    rows = [{"step": i, "loss": round(float(v), 4)} for i, v in enumerate(loss)]
    lines = [json.dumps(row | ({"val_loss": val[i]} if i in val else {})) for i, row in enumerate(rows)]
    return "\n".join([*lines[:70], '{"step": 70, "lo', *lines[70:]]) + "\n"


@pytest.fixture
def in_pieces(monkeypatch):
    "Tables come in pieces from the first row on."
    monkeypatch.setattr(table_files, "_LONG_FILE", 0)
    monkeypatch.setattr(table_files, "_ROWS_PIECE", 7_000)
    monkeypatch.setattr(table_files, "_JSON_PIECE", 2**18)


def same_scalars(one, other) -> bool:
    "Whether two runs have the same series."
    return one["scalars"].to_dataset().identical(other["scalars"].to_dataset())


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_table_in_pieces_is_the_table_whole(tmp_path, suffix, request):
    path = tmp_path / f"metrics.{suffix}"
    path.write_text(table_of(healthy(np.random.default_rng(5))[:20_000], suffix))
    (whole,) = read_runs(path).values()
    request.getfixturevalue("in_pieces")
    (pieces,) = read_runs(path).values()
    assert whole["scalars"].sizes["step"] == 20_000 and same_scalars(whole, pieces)
    assert whole.attrs == pieces.attrs


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_long_table_is_thinned_and_keeps_what_is_rare(tmp_path, suffix, monkeypatch, in_pieces):
    loss = healthy(np.random.default_rng(6))[:60_000]
    single(loss)
    loss[50_003:50_006] = np.nan
    path = tmp_path / f"metrics.{suffix}"
    path.write_text(table_of(loss, suffix))
    (whole,) = (run["scalars"].to_dataset() for run in read_runs(path).values())
    monkeypatch.setattr(columns, "_MAX_VALUES", 40_000)
    (run,) = read_runs(path).values()
    kept = run["scalars"].to_dataset()
    assert kept.sizes["step"] < 30_000 and kept.attrs["thinned"] > 1
    logged = series(kept, "loss")
    same = series(whole, "loss").sel(step=logged.step)
    assert np.array_equal(logged.values, same.values, equal_nan=True)
    assert int(kept.val_loss.notnull().sum()) == 120 and float(kept.loss.max()) == float(whole.loss.max())
    findings = diagnose(run)
    (non_finite,) = (f for f in findings if f.kind == "non_finite")
    assert non_finite.onset == 50_003 and non_finite.evidence["nan"] == 3
    report = run_json(run, findings)
    assert (report["n_steps"], report["last_step"], report["thinned"]) == (
        60_000,
        59_999,
        kept.attrs["thinned"],
    )


def test_steps_that_start_over_with_the_epoch_are_read_whole(tmp_path, in_pieces):
    rows = [
        f"{epoch},{batch},{3 - 0.1 * epoch - batch / 1e5}" for epoch in range(4) for batch in range(5_000)
    ]
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,batch,loss\n" + "\n".join(rows) + "\n")
    (run,) = read_runs(path).values()
    step = run["scalars"].step.values
    assert step[0] == 0 and step[-1] == 19_999 and (np.diff(step) == 1).all()
