"The tables of phenomena and remedies: complete, well formed, and of use to every finding that has reports."

import re

import pytest

from stabilitylab.detect.likely_cause import _TABLE as LIKELY_CAUSES
from stabilitylab.fixes.registry import fix, fixes
from stabilitylab.knowledge.choice import load_fits
from stabilitylab.knowledge.phenomena import contradictions, load_rows, phenomena, search
from stabilitylab.knowledge.remedies import remedies_for, remedies_table
from stabilitylab.names.errors import InputError
from stabilitylab.names.findings import FINDING_KINDS, REPORTED

ROWS = {t: load_rows(t) for t in ("phenomena", "remedies")}
ALL = [r for rows in ROWS.values() for r in rows]
NO_REPORT = {"overfitting", "dead_units"}  # kinds of which no account that we know speaks
NO_FIX = {  # kind -> why no fix of the registry is reported against it
    "restart": "what a run did, and no fault",
    "environment_change": "set the environment back",
    "hardware_error": "change the machine",
    "misaligned_shape": "change the shape of the model before it trains",
    "layer_ignored": "change the architecture before it trains",
    "overfitting": "no account speaks of it",
    "dead_units": "no account speaks of it",
}
NO_KIND = {
    "average_states": "a mean of checkpoints is evaluated: a gain without a fault"
}  # fix -> why no finding


@pytest.mark.parametrize(
    "team, last", [("vlm", 22), ("idefics", 23), ("opt", 31), ("mt", 48), ("mle", 19), ("new", 22)]
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
        assert len(r["name"]) <= 130 and len(r["note"]) <= 200, r["id"]
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
