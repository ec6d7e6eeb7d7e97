"Failing runs with a known onset: what the detectors find in them, miss in them, and say without cause."

import json

import numpy as np
import pytest
import torch

from stabilitylab.cases.case import CaseScore
from stabilitylab.cases.logs import LOG_CASES, RECORDS, log_case, onset_of, write_log_case
from stabilitylab.cases.registry import (
    all_cases,
    by_kind,
    case,
    cases,
    ground_truth,
    main,
    score_case,
    stored_scores,
)
from stabilitylab.cases.states import scaled_queries
from stabilitylab.detect.diagnose import diagnose
from stabilitylab.names.errors import InputError
from stabilitylab.names.words import FINDING_KINDS
from stabilitylab.run.record import validate_run

LOGS = [name for name, one in all_cases().items() if one.source in ("written log", "several logs")]
HARD = {"slow hill"}  # smaller than the fall it stands on for some seeds; counted in the stored table
QUICK = (
    "deaf",
    "hears",
    "mean of means",
    "nothing to read",
    "one-hot rows",
    "beyond fp16",
    "moments forgotten",
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_kind_has_a_case_and_every_name_is_told_once():
    table = cases()
    assert set(table.kind) - {""} == set(FINDING_KINDS)
    assert table.index.is_unique and (table.kind == "").sum() >= 4
    assert list(cases("overflow").index) == ["beyond fp16"]


@pytest.mark.parametrize("name", LOGS)
def test_what_is_planted_in_a_log_is_found_at_its_onset_and_nothing_else(name):
    score = score_case(name, seed=4)
    assert score.false_alarms == () and score.false_notes == ()
    if score.kind and name not in HARD:
        assert score.at_onset, score


@pytest.mark.slow  # trains a model a case
@pytest.mark.parametrize("name", QUICK)
def test_what_is_planted_in_a_model_is_found(name):
    score = score_case(name, seed=1)
    assert (score.at_onset or not score.kind) and score.false_alarms == (), score


def test_the_onset_moves_with_the_seed_and_so_does_the_finding():
    found = {seed: diagnose(log_case("bad batch", seed)).of("loss_spike")[0].onset for seed in (0, 3, 7)}
    assert found == {seed: onset_of(seed) for seed in found} and len(set(found.values())) == 3


@pytest.mark.parametrize("name", ["bad batch", "bump after resume", "NaN loss"])
def test_the_written_log_holds_what_was_planted(name, tmp_path):
    "Read with json alone, not with the reader."
    rows = [json.loads(line) for line in write_log_case(name, tmp_path, 2).read_text().splitlines()]
    run = validate_run(log_case(name, 2))
    assert len(rows) == RECORDS == run["scalars"].sizes["step"]
    loss = np.array([row["loss"] for row in rows])
    read = run["scalars"].loss.values
    assert np.array_equal(read, loss, equal_nan=True)
    assert sum("val_loss" in row for row in rows) == RECORDS // 50
    assert log_case(name, 2).identical(run)


def test_a_fault_that_is_taken_out_again_is_not_found():
    "The same model with and without the leap of its queries."
    assert "attention_logit_growth" in diagnose(scaled_queries(2)).kinds
    assert diagnose(scaled_queries(2, factor=1.0)).kinds == []


def _score(kind, found, near, alarms=(), notes=()):
    return CaseScore("made", kind, 0, found, "warning", 0, near, alarms, notes, 0.1)


def test_precision_and_recall_by_hand():
    "Of `overflow`: two planted, one found in time, one too far; one alarm in a healthy run, one note."
    table = by_kind(
        [
            _score("overflow", True, True),
            _score("overflow", True, False, alarms=("divergence",)),
            _score("", False, False, alarms=("overflow",)),
            _score("", False, False, notes=("overflow",)),
        ]
    )
    row = table.loc["overflow"]
    assert (row.runs, row.found, row.at_onset, row.false_alarms, row.false_notes) == (2, 2, 1, 1, 1)
    assert row.precision == 0.5 and row.recall == 0.5
    assert table.loc["divergence", "precision"] == 0 and np.isnan(table.loc["divergence", "recall"])
    assert np.isnan(table.loc["crash", "precision"])


def test_the_stored_table_covers_every_case_and_is_good():
    stored = stored_scores()
    assert {row["case"] for row in stored["cases"]} == set(all_cases()) and stored["command"]
    truth = ground_truth()
    assert (truth.runs > 0).all() and truth.recall.mean() >= 0.95
    assert truth.false_alarms.sum() <= 0.05 * len(stored["cases"])


def test_unknown_names_are_told_with_what_is_allowed():
    for call in (lambda: case("no such"), lambda: score_case("no such"), lambda: log_case("no such")):
        with pytest.raises(InputError, match="bad batch"):
            call()
    with pytest.raises(InputError, match="overflow"):
        cases("no such kind")


def test_the_command_lists_and_refuses(capsys):
    assert main([]) in (0, None)
    listed = capsys.readouterr().out
    assert all(name in listed for name in LOG_CASES)
    assert main(["score", "no_such"]) == 2 and "bad batch" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["no such word"])
    assert stopped.value.code == 2
