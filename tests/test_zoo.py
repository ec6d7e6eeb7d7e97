"The cause of recorded runs whose cause is known, and the cures that follow; the whole zoo is `make zoo`."

import json
import sys

import numpy as np
import pytest

from stabilitylab.cli.main import main
from stabilitylab.detect.diagnose import diagnose
from stabilitylab.detect.facts.evidence import evidence
from stabilitylab.detect.facts.jump_facts import loss_event
from stabilitylab.detect.findings import Finding, Findings
from stabilitylab.detect.likely_cause import _CAUSES as TABLE
from stabilitylab.detect.likely_cause import most_likely, ranked_causes
from stabilitylab.fixes.registry import fixes
from stabilitylab.names.words import FINDING_KINDS
from stabilitylab.run.record import new_run, save_run
from stabilitylab.run.scalars import Samples, make_scalars
from stabilitylab.trial.arm import arm_of
from stabilitylab.trial.suggest import suggest
from tests.zoo.__main__ import record, score, stored, summary
from tests.zoo.peers import ask, peer_summary, write_log
from tests.zoo.rows import BLIND, ROWS, split

JUMP = {
    "loss_jump": (5.0, 101),
    "event_step": (101.0, 101),
    "grad_before": (1.1, 99),
    "nonfinite": (0.0, None),
}
ORDINARY = JUMP | {"update_before": (1.1, 100), "input_jump": (1.0, 101), "forward_jump": (1.0, 101)}


def test_every_row_of_the_table_names_fixes_that_exist_and_conditions_that_can_be_read():
    for row in TABLE:
        assert {"id", "family", "weight", "at", "need", "for", "against", "cause", "next"} <= set(row)
        assert all(arm_of(cure).fixes for cure in row["cures"])
        assert all(len(c) == 3 and c[1] in (">", ">=", "<", "<=", "=") for c in row["need"])
        assert all(len(c) == 5 for c in (*row["for"], *row["against"]))
    assert {row.cause for row in ROWS.values()} - {""} <= {row["id"] for row in TABLE}


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        (JUMP | {"update_before": (80.0, 100)}, "optimizer_state_reset"),
        (JUMP | {"update_before": (1.0, 100), "input_jump": (300.0, 101)}, "bad_inputs"),
        (ORDINARY | {"back_at_once": (0.9, 104)}, "bad_labels"),
        (ORDINARY | {"back_at_once": (0.1, 141)}, "data_shift"),
        ({"first_over_chance": (9.0, 0)}, "init_too_wide"),
        ({"zero_grads": (0.6, None), "fall": (0.0, 159)}, "dead_network"),
        ({"weight_moved": (40.0, 100)}, "bit_flip"),
        ({"eps": (0.1, None), "update_per_rate": (1e-3, None), "zero_grads": (0.0, None)}, "eps_too_large"),
        (
            {
                "eps": (0.01, None),
                "update_per_rate": (0.09, None),
                "zero_grads": (0.0, None),
                "found grad_below_epsilon": (1.0, 0),
            },
            "eps_too_large",
        ),
        ({"token_ratio": (16.0, 0)}, "token_imbalance"),
    ],
)
def test_evidence_names_its_cause(facts, cause):
    assert ranked_causes(facts)[0].id == cause


def test_a_cause_is_told_with_its_step_its_rival_and_what_is_missing():
    told = most_likely(
        Findings([Finding("loss_spike", "warning", 101)], {"evidence": JUMP | {"update_before": (80.0, 100)}})
    ).to_dict()
    assert (told["id"], told["step"], told["confidence"]) == ("optimizer_state_reset", 100, "high")
    assert "update_clip" in told["cures"] and told["missing"]
    assert ranked_causes(ORDINARY | {"weight_moved": (-0.1, 3), "zero_grads": (0.0, None)}) == []


def test_a_cause_that_can_be_replayed_names_the_swap_test_and_a_log_what_it_lacks():
    attrs = {
        "evidence": JUMP | {"update_before": (80.0, 100), "swap_seconds": (4.2, 101)},
        "source": "my run",
    }
    told = most_likely(Findings([Finding("loss_spike", "warning", 101)], attrs)).to_dict()
    assert told["test"] == "stabilitylab replay 'my run' --step 101" and "about 4 s" in told["missing"][-1]
    loss = 2 + 0.01 * np.random.default_rng(0).normal(size=400)
    loss[200:] += 1
    likely = most_likely(diagnose(new_run(make_scalars({"loss": Samples(np.arange(400), loss)}))))
    assert "Can't tell" not in likely.cause or any("learning rate" in words for words in likely.missing)
    both = ranked_causes(
        ORDINARY | {"update_before": (80.0, 100), "update_peak": (90.0, 100), "grad_at_peak": (1.0, 100)}
    )
    assert len({cause.id for cause in both}) == len(both)


def test_a_validation_that_is_no_number_is_not_told_as_the_loss():
    told = [
        most_likely(
            Findings([Finding("non_finite", "error", 1, evidence={"stays": True}, series=name)])
        ).cause
        for name in ("val_loss", "loss")
    ]
    assert told[0].startswith("The validation loss") and told[1].startswith("The loss became")


def test_a_crash_and_a_log_are_told_as_before():
    crash = Finding("crash", "error", 5, evidence={"cause": "disk full", "ended": True})
    assert "disk" in most_likely(Findings([crash], {"evidence": {"first_over_chance": (9.0, 0)}})).cause
    log = new_run(make_scalars({"loss": Samples(np.arange(50), np.r_[np.full(40, 2.0), np.full(10, 9.0)])}))
    assert evidence(log) == {} and loss_event(np.r_[np.full(40, 2.0), 9.0]) == 40


def test_the_split_crosses_causes_and_the_stored_cures_are_of_rows():
    sides = split()
    for cause in {row.cause for row in ROWS.values()}:
        names = [name for name, row in ROWS.items() if row.cause == cause and name not in BLIND]
        assert len(names) == 1 or {sides[name] for name in names} == {"fit", "held out"}
    assert {sides[name] for name in BLIND} == {"blind"} and set(stored()) <= set(ROWS)
    assert all(
        len(c["interval"]) == 2 for row in stored().values() for c in row["cures"].values() if c["gain"]
    )


ONLY_FAILURES = "no team reports that it worked"
OUTVOTED = "others are reported more often against the same findings; `--fix` tries it"
NEVER_SUGGESTED = {  # fix -> why
    "placebo": "a control",
    "inside_scale": ONLY_FAILURES,
    "normformer": ONLY_FAILURES,
    "label_smoothing": ONLY_FAILURES,
    "neftune": ONLY_FAILURES,
    "no_embedding_scale": ONLY_FAILURES,
    "position_start": ONLY_FAILURES,
    "sgd_like_adam": ONLY_FAILURES,
    "muon": ONLY_FAILURES,
    "update_filter": ONLY_FAILURES,
    "predivide": ONLY_FAILURES,
    "other_seed": ONLY_FAILURES,
    "curriculum": ONLY_FAILURES,
    "reset_moments": ONLY_FAILURES,
    "dyt": "reported once, without a clear result",
    "adamc": "reported once, without a clear result",
    "rms_norm": OUTVOTED,
    "unfreeze_norms": OUTVOTED,
    "average_states": "a gain without a fault",
    "batch_warmup": "a gain without a fault",
    "ema": "a gain without a fault",
    "head_fp32": "a fault that no record of training shows",
    "attention_fp32": "a fault that no record of training shows",
    "deepnorm": "another model, which a run can only begin with",
} | dict.fromkeys(
    ("layer_scale", "norm_scaling", "attention_weights", "decay_to_zero", "mup_rates"),
    "reported by its own paper alone",
)


def test_every_fix_can_be_suggested_or_says_why_not():
    run = new_run(make_scalars({"loss": Samples(np.arange(50), np.linspace(3, 2, 50))}))
    reachable = {cure.partition(":")[0] for row in TABLE for cure in row["cures"]}
    for kind in FINDING_KINDS:
        every = suggest([Finding(kind, "warning", 10, evidence={"ended": True})], run, 8)
        reachable |= {suggestion.name for suggestion in every if not suggestion.is_control}
    assert set(fixes().name) - reachable == set(NEVER_SUGGESTED)


QUICK = (
    "conv inputs",
    "mlp",
    "conv moments",
    "mlp dead",
    "conv raised",
    "gpt wide",
    "diffusion",
    "conv flip",
)


LOADER = (
    "import csv\nload = lambda path: [list(csv.DictReader(open(path)))]\n"  # of a peer made up for the test
)


def test_the_peers_are_asked_in_a_python_of_their_own(tmp_path, monkeypatch):
    (tmp_path / "runmedic").mkdir()
    (tmp_path / "runmedic" / "__init__.py").write_text("from runmedic import loaders, roles\n")
    (tmp_path / "runmedic" / "loaders.py").write_text(LOADER)
    (tmp_path / "runmedic" / "roles.py").write_text("detect = lambda run, chosen: {}\n")
    (tmp_path / "runmedic" / "checks.py").write_text(  # warns where the loss ends high, and notes each run
        "from types import SimpleNamespace as F\n"
        "def run_checks(run, roles):\n"
        "    found = [F(check='note', severity='info')]\n"
        "    ends_high = float(run[-1]['loss']) > 3\n"
        "    return found + [F(check='high', severity='critical')] * ends_high\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    causes = {"bad": "rate_too_high", "unseen": "bit_flip", "well": ""}
    for name, last in (("bad", 9.0), ("unseen", 2.0), ("well", 1.0)):
        scalars = {"loss": Samples(np.arange(4), np.array([4, 3, 2, last]))}
        save_run(new_run(make_scalars(scalars)), tmp_path / name)
        write_log(tmp_path / name, tmp_path / f"{name}.csv")
    answers = ask(sys.executable, [tmp_path / f"{name}.csv" for name in causes])
    assert answers["runmedic"] == {"bad": ["high"], "unseen": [], "well": []}
    first, *others = peer_summary(answers, causes)
    assert first == "runmedic: warned of 1/2 failing, quiet on 1/1 healthy"
    assert [line.startswith("trainscope ") and "not importable" in line for line in others] == [True] * 3


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    "A folder of records, each made once."
    return tmp_path_factory.mktemp("zoo")


@pytest.mark.slow
def test_a_bounded_part_of_the_zoo(records):
    scores = {name: score(name, records) for name in QUICK}
    assert all(row["cause_first"] for row in scores.values()), {n: r["said"] for n, r in scores.items()}
    assert all(row["is_quiet"] for row in scores.values() if not row["cause"])
    assert "cause first" in summary(scores)["fit"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv inputs", "mlp dead", "mlp"])
def test_a_plan_says_start_arms_and_what_was_unfit_and_a_healthy_run_gets_none(name, records, capsys):
    assert main(["trial", str(record(name, records)), "--plan", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert set(plan) == {"start", "arms", "unfit"}
    assert all(arm["why"] for arm in plan["arms"])
    assert bool(plan["arms"]) == bool(plan["start"]) == bool(ROWS[name].cause)


@pytest.mark.parametrize(("onset", "end", "name"), [(104, 105, "bad_labels"), (1058, 1059, ""), (1, 16, "")])
def test_a_bad_batch_is_the_cause_of_what_was_found_at_its_step(onset, end, name):
    "Of a loss that often jumps the first jump was named, which no finding was about."
    facts = ORDINARY | {"back_at_once": (0.9, 104)}
    spike = Finding("loss_spike", "warning", onset, end, explanation="The loss jumped.")
    assert most_likely(Findings([spike], {"evidence": facts})).id == name


@pytest.mark.parametrize(("fall", "words"), [(0.9, "the loss fell all the same"), (0.1, "does not train.")])
def test_an_unused_part_of_a_model_that_learns_is_called_so(fall, words):
    part = Finding(
        "no_gradient", "warning", 0, evidence={"names": ["last.weight"]}, explanation="No gradient."
    )
    assert words in most_likely(Findings([part], {"evidence": {"fall": (fall, 79)}})).cause
