"The tables of phenomena and remedies: complete, well formed, and of use to every finding that has reports."

import ast
import importlib
import inspect
import re
from types import SimpleNamespace

import pandas as pd
import pytest

from reproductions import note_calls, note_logs, note_states
from reproductions.note_calls import is_found, run_call
from stabilitylab.cases import registry
from stabilitylab.detect.likely_cause import _BY_FINDINGS as LIKELY_CAUSES
from stabilitylab.fixes.registry import fix, fixes
from stabilitylab.knowledge.remedies import (
    contradictions,
    load_fits,
    load_rows,
    phenomena,
    remedies_for,
    remedies_table,
    search,
    source_url,
)
from stabilitylab.knowledge.symptoms import explain_crash
from stabilitylab.names.errors import InputError
from stabilitylab.names.words import FINDING_KINDS, REPORTED

ROWS = {t: load_rows(t) for t in ("phenomena", "remedies")}
ALL = [r for rows in ROWS.values() for r in rows]
NO_REPORT = {"memory_growth", "data_stall"}  # kinds of which no account that we know speaks
NO_FIX = {  # kind -> why no fix of the registry is reported against it
    "restart": "what a run did, and no fault",
    "environment_change": "set the environment back",
    "hardware_error": "change the machine",
    "throughput_drop": "the machine, the network or the loader, and not the training",
    "misaligned_shape": "change the shape of the model before it trains",
    "layer_ignored": "change the architecture before it trains",
    "memory_growth": "the program keeps what it should let go",
    "data_stall": "the loader is no part of the model",
    "expert_collapse": "the balance of a router is part of the model's own loss",
} | dict.fromkeys(
    (
        "policy_entropy_collapse",
        "policy_entropy_rise",
        "policy_step_too_large",
        "reward_collapse",
        "zero_advantage",
        "answers_cut",
    ),
    "a trial trains on recorded batches, and a policy makes its own",
)
EVIDENCE = {
    "stated by the team",
    "read in the source",
    "derived",
    "measured by this project",
    "from memory, not verified",
}
NOTES = {  # what "stated by the team" may stand beside: the five notes
    "Hugging Face VLM note",
    "IDEFICS-80B memo",
    "OPT-175B note",
    "practitioner's MT and LoRA notes",
    "ML Engineering",
}
ITEMS = {item["id"]: item for item in load_rows("items")}
CALLS = {item["call"]: item["id"] for item in ITEMS.values() if item["state"] == "works"}
SLOW = {item["call"] for item in ITEMS.values() if item.get("is_slow")}
MISSING = 0  # items that nothing shows
NO_KIND = {  # fix -> why no finding
    "attention_fp32": "16-bit rounding of logits shows in no record",
    "average_states": "a mean of checkpoints is evaluated: a gain without a fault",
    "batch_warmup": "saves work while the noise of the gradient is small: no fault asks for it",
    "deepnorm": "a choice at the start of a deep post-norm model",
    "ema": "a running mean is evaluated: a gain without a fault",
    "head_fp32": "training and inference disagree, which no record of training shows",
}


@pytest.mark.parametrize(
    "team, last", [("vlm", 22), ("idefics", 28), ("opt", 33), ("mt", 61), ("mle", 20), ("new", 30)]
)
def test_every_row_of_the_accounts_is_there(team, last):
    seen = {int(m[1]) for r in ALL if (m := re.fullmatch(rf"{team}-(\d+)[a-z]?", r["id"]))}
    assert seen == set(range(1, last + 1))


def test_rows_are_well_formed():
    ids = [r["id"] for r in ALL]
    assert len(ids) == len(set(ids))
    for r in ALL:
        assert set(r["kinds"]) <= set(FINDING_KINDS), r["id"]
        assert all(r[k].strip() for k in ("name", "source", "topic", "note", "evidence")), r["id"]
        assert len(r["name"]) <= 130 and len(r["note"]) <= 200 and len(r["ours"]) <= 200, r["id"]
        assert r["evidence"] in EVIDENCE and isinstance(source_url(r["source"]), str), r["id"]
    assert all(r["reported"] in REPORTED for r in ROWS["remedies"])
    assert all("reported" not in r for r in ROWS["phenomena"])


@pytest.mark.parametrize("kind", [k for k in FINDING_KINDS if k not in NO_REPORT])
def test_every_kind_gets_a_remedy_with_source_and_verdict(kind):
    rows = remedies_for(kind)
    assert rows and all(r["name"] and r["source"] and r["reported"] in REPORTED and r["note"] for r in rows)
    order = [("worked", "unclear", "did not work").index(r["reported"]) for r in rows]
    assert order == sorted(order)


def test_kinds_without_reports_give_an_empty_list_not_an_error():
    for kind in NO_REPORT:
        assert remedies_for(kind) == [] and phenomena(kind).empty


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5, 100])
def test_limit_keeps_every_verdict(limit):
    rows = remedies_for("divergence")
    short = remedies_for("divergence", limit)
    assert len(short) == min(limit, len(rows))
    if limit >= 3:
        assert {r["reported"] for r in short} == set(REPORTED)


def test_rows_handed_out_are_copies():
    remedies_for("divergence")[0]["name"] = "changed"
    assert remedies_for("divergence")[0]["name"] != "changed"


def test_opposite_reports_stand_side_by_side():
    for topic in (
        "adam epsilon",
        "adam beta2",
        "rmsnorm",
        "z-loss",
        "gradient clipping",
        "attention scale inside",
    ):
        assert len(set(remedies_table(topic).reported)) > 1, topic
        assert topic in set(contradictions().topic) or topic == "gradient clipping"
    assert remedies_table().topic.is_monotonic_increasing and (contradictions().sides.map(len) > 1).all()


def test_search_finds_words_anywhere_and_in_any_case():
    assert "Kimi K2" in set(search("QK-CLIP").source)
    assert set(search("beta2 bloom").source) >= {"BLOOM"}
    with pytest.raises(InputError, match="allowed"):
        phenomena("nonsense")


def test_kinds_reports_and_fixes_are_one_linked_table():
    reports = {row["id"]: row for row in ALL}
    links = {
        (kind, row, name)
        for name in fixes().name
        for row in fix(name).about.rows
        for kind in reports[row]["kinds"]
    }
    kinds, _, names = map(set, zip(*links, strict=True))
    assert set(FINDING_KINDS) - kinds == set(NO_FIX)
    assert set(fixes().name) - names == set(NO_KIND)


def test_no_table_names_what_is_not_there():
    ids = {row["id"] for row in ALL}
    assert {row for name in fixes().name for row in fix(name).about.rows} <= ids
    assert set(load_fits()) <= ids
    assert {kind for row in LIKELY_CAUSES for kind in row["when"]} <= set(FINDING_KINDS)


def test_what_a_team_stated_stands_in_its_note_and_what_is_ours_apart():
    for row in ALL:
        assert (row["evidence"] != "stated by the team") or row["source"] in NOTES, row["id"]
    no_address = {row["source"] for row in ALL if not source_url(row["source"])}
    assert no_address == {"this project", "practitioner's MT and LoRA notes", "Causal-ablation grading"}


def reported(row):
    "What a report says of its remedy."
    return next(r["reported"] for r in ROWS["remedies"] if r["id"] == row)


def test_reports_end_as_the_notes_say():
    listed_as_failed = ["vlm-5", "opt-10", "opt-13", "opt-14", "opt-19", "opt-32", "mt-15", "mt-17", "mt-28"]
    assert {reported(row) for row in listed_as_failed} == {"did not work"}
    assert {reported(f"mt-43{part}") for part in "abcdf"} == {"did not work"} and reported(
        "mt-43e"
    ) == "unclear"
    assert {reported(row) for row in ("mt-7", "mt-38", "mt-39", "vlm-12", "opt-20")} == {"worked"}
    advice = ("mt-8", "mt-31", "mt-32", "mt-33", "mt-53", "mt-56")  # an outcome is not told
    assert {reported(row) for row in (*advice, "idefics-7", "opt-21", "opt-33", "mle-3")} == {"unclear"}


def test_guesses_of_ours_do_not_stand_in_what_a_note_says():
    for row in ALL:
        words = row["note"].lower()
        assert row["source"] not in NOTES or not re.search(
            r"logbook|chronicle|our guess|as we read", words
        ), row["id"]


def test_items_are_well_formed_and_every_row_of_the_notes_stands_in_one():
    ids = {row["id"] for row in ALL}
    for item in ITEMS.values():
        assert set(item["rows"]) <= ids and item["item"].strip() and len(item["item"]) <= 110, item["id"]
        assert ("call" in item) >= (item["state"] == "works"), item["id"]
        assert item.get("numbers") or item["state"] in ("works", "missing"), item["id"]
    in_items = {row for item in ITEMS.values() for row in item["rows"]}
    of_notes = {row["id"] for row in ALL if row["source"] in NOTES}
    assert of_notes <= in_items
    states = [item["state"] for item in ITEMS.values() if item["note"] != "later"]
    assert set(states) <= {"works", "advice", "can't at this size", "missing"}
    assert states.count("missing") <= MISSING


def shown(calls):
    "Items whose calls find nothing, or cannot be made."
    failed = {}
    for call in calls:
        try:
            result = is_found(run_call(call))
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        if result is not True:
            failed[CALLS[call]] = (call, result)
    return failed


@pytest.mark.slow
@pytest.mark.parametrize("note", ["0", "1", "2", "3", "4", "later"])
def test_every_call_finds_what_its_item_says(note):
    calls = [c for c in CALLS if c not in SLOW and ITEMS[CALLS[c]]["note"] == note]
    assert calls and not shown(calls)


def test_every_call_gives_arguments_that_its_function_takes():
    "Slow calls run apart: a parameter that they alone give was taken away."
    for call in CALLS:
        for node in (n for n in ast.walk(ast.parse(call)) if isinstance(n, ast.Call)):
            home = note_calls.homes().get(getattr(node.func, "id", ""))
            keywords = [keyword.arg for keyword in node.keywords]
            if home is None or None in keywords or any(isinstance(a, ast.Starred) for a in node.args):
                continue
            function = getattr(importlib.import_module(home), node.func.id)
            inspect.signature(function).bind(*node.args, **dict.fromkeys(keywords))


@pytest.mark.slow
@pytest.mark.parametrize("call", sorted(SLOW), ids=CALLS.get)
def test_every_slow_call_finds_what_its_item_says(call):
    assert not shown([call])


def test_a_call_that_finds_nothing_is_told():
    assert not is_found(run_call('(tried("lower_lr"), tried("lower_lr", factor=1.0))'))
    with pytest.raises(InputError, match="others tell nothing"):
        is_found(run_call('"a word"'))
    assert not is_found(run_call('finds("multithreading off", "divergence")'))
    CALLS["1 / 0"] = "none"
    assert list(shown(["1 / 0"])) == ["none"]


def test_no_call_finds_its_thing_where_there_is_none(monkeypatch):
    "Every log is a healthy one, no fix changes anything, no case is found: then no call may find a thing."
    healthy, table = note_logs.note_findings("multithreading off"), pd.DataFrame({"part": []})
    table.attrs["losses"] = [0.0]
    not_found = SimpleNamespace(found=False, leads={}, module="", severity="")
    empty = {
        "note_findings": healthy,
        "tried": table,
        "bundle": table,
        "learned": 0.0,
        "score_case": not_found,
    }
    for name, result in empty.items():
        home = next(module for module in (note_logs, note_states, registry) if hasattr(module, name))
        monkeypatch.setattr(home, name, lambda *_, result=result, **__: result)
    calls = [c for c in CALLS if re.search(rf"\b(finds|{'|'.join(empty)})\(", c)]
    assert len(calls) > 150
    assert {CALLS[c] for c in calls} - set(shown(calls)) == set()


def tried_in(call):
    "Fixes that a call applies."
    nodes = [n for n in ast.walk(ast.parse(call)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    named = [n.args for n in nodes if n.func.id in ("tried", "bundle", "fix")]
    return {a.value for args in named for a in args if isinstance(a, ast.Constant)}


def test_the_fixes_of_an_items_call_are_linked_to_its_reports():
    for item in ITEMS.values():
        names = tried_in(item.get("call", ""))
        remedies = set(item["rows"]) & {row["id"] for row in ROWS["remedies"]}
        linked = {row for name in names for row in fix(name).about.rows}
        assert not names or not remedies or linked & remedies, (item["id"], names)


def test_every_remedy_that_can_be_run_has_a_fix_or_a_call():
    linked = {row for name in fixes().name for row in fix(name).about.rows}
    called = {row for item in ITEMS.values() if item["state"] != "missing" for row in item["rows"]}
    waiting = {row for item in ITEMS.values() if item["state"] == "missing" for row in item["rows"]}
    remedies = {row["id"] for row in ROWS["remedies"] if row["what"] == "remedy"}
    assert remedies <= linked | called | waiting


@pytest.mark.parametrize(
    "tried, is_fragmented", [("2.00GiB", True), ("4.00 GiB", False), ("1.2.3 GiB", False)]
)
def test_a_size_may_have_no_space_before_its_unit(tried, is_fragmented):
    words = f"CUDA out of memory. Tried to allocate {tried}. 3.00GiB is reserved by PyTorch but unallocated."
    crash = {"cause": "out of GPU memory", "name": "torch.OutOfMemoryError", "message": words}
    told = explain_crash(crash | {"rank": 0, "step": 5, "outside": False})
    assert any("3.00GiB" in step for step in told["next"]) == is_fragmented
