"""Recorded runs of the zoo that travel with the project: the cause of each, and the facts that it rests on.

`python -m tests.test_zoo_records` writes the table of facts anew; its diff is then read line by line.
"""

import json
import tarfile
import tempfile
import warnings
from pathlib import Path

import pytest

from stabilitylab.detect.diagnose import diagnose
from stabilitylab.detect.findings import Findings
from stabilitylab.detect.likely_cause import most_likely, ranked_causes
from stabilitylab.investigation.opening import open_recordings
from stabilitylab.names.encode import to_json
from stabilitylab.report.brief import brief
from tests.zoo.pack import PACKED, RECORDS
from tests.zoo.rows import ROWS

TABLE = RECORDS / "facts.json"


def answer(name: str, folder: Path) -> dict:
    "What is told of one run: findings, facts with three digits, the cause and its rivals."
    with tarfile.open(RECORDS / f"{name.replace(' ', '_')}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    (recording,) = open_recordings(str(folder)).values()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        findings = diagnose(recording)
    likely = most_likely(findings)
    facts = findings.attrs.get("evidence", {})
    short = brief(recording.run, findings, name)
    assert len(short.text()) <= 1500 and len(to_json(short)) <= 1500, name
    cause = likely.to_dict() if likely else {}
    return {
        "cause": cause.get("id", ""),
        "confidence": cause.get("confidence", ""),
        "rivals": [rival["id"] for rival in cause.get("rivals", ())],
        "missing": list(cause.get("missing", ())),
        "findings": [f"{f.kind} {f.severity} {f.onset} {f.end}" for f in findings],
        "facts": {key: f"{value:.3g} {step}" for key, (value, step) in sorted(facts.items())},
    }


@pytest.mark.parametrize("name", PACKED)
def test_the_cause_of_a_recorded_run_and_the_facts_it_rests_on(name, tmp_path):
    told = answer(name, tmp_path)
    assert told["cause"] == ROWS[name].cause
    assert told == json.loads(TABLE.read_text(encoding="utf-8"))[name]


def test_a_raised_rate_is_undone_and_its_step_is_the_one_to_replay(tmp_path):
    "The rate rose sixty-fold at once: the fix goes back to the rate before, and `next` looks at that step."
    from stabilitylab.mcp.server import Tools
    from stabilitylab.report.content import replay_command
    from stabilitylab.trial.suggest import suggest

    answer("lstm raised", tmp_path)
    (recording,) = open_recordings(str(tmp_path)).values()
    findings = diagnose(recording)
    jump = next(f for f in findings if f.kind == "lr_jump")
    first = suggest(findings, recording.run)[0]
    after = first.parameters["factor"] * jump.evidence["lr_after"]
    assert first.name == "lower_lr" and abs(after / jump.evidence["lr_before"] - 1) < 0.05
    likely = most_likely(findings)
    assert likely.step == jump.onset
    slow = jump.with_(kind="throughput_drop", onset=20, evidence={})  # a machine that was busy before
    findings = Findings([slow, *findings], findings.attrs)
    assert brief(recording.run, findings).symptom_step == likely.step
    assert replay_command(recording.run, findings, str(tmp_path)).endswith(f" --step {likely.step}")
    told = Tools([tmp_path]).diagnose(str(tmp_path))
    assert told["next"]["arguments"]["step"] == likely.step


def test_a_weight_that_nothing_updated_and_a_rate_beyond_adam_need_no_finding_of_the_loss():
    "A flipped bit may change no loss, and a rate of 0.4 may still learn: the record itself shows both."

    def alone(**facts):
        return [c.id for c in ranked_causes({k: (v, 100) for k, v in facts.items()}) if c.is_alone]

    assert alone(weight_moved=850.0, weight_moved_steps=1.0) == ["bit_flip"]
    assert alone(weight_moved=0.5, weight_moved_steps=1.0) == []  # as of a reset of a layer
    assert alone(weight_moved=850.0, weight_moved_steps=20.0) == []  # a writer that belongs to the loop
    high = {"rate": 0.4, "adam_rate": 0.4, "early_update": 0.43, "rate_excess": 20.0}
    assert alone(**high) == ["rate_too_high"]
    assert alone(**high | {"early_update": 0.02}) == []  # as of an embedding that learns fast
    assert alone(**high | {"adam_rate": 0.003}) == []  # as of matrices that began at zero


def write() -> None:
    answers = {}
    for name in PACKED:
        with tempfile.TemporaryDirectory() as folder:
            answers[name] = answer(name, Path(folder))
    TABLE.write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
