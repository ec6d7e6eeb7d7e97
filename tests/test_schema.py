"Every answer in JSON is what the schema of its command says."

import json
import re
import shutil

import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import save_file

from stabilitylab.cases.registry import sample
from stabilitylab.cli.explain import schema
from stabilitylab.cli.main import make_parser
from tests.command import command
from tests.notebooks import ROOT
from tests.test_page_commands import AUDITED

SAMPLE = sample("lm_high_lr")
LOGS = sorted((ROOT / "tests" / "logs").iterdir())
CALLS = {
    "diagnose": [["diagnose", SAMPLE], ["diagnose", SAMPLE, "--all-remedies"]],
    "diagnose --brief": [["diagnose", SAMPLE, "--brief"], ["diagnose", SAMPLE, "--brief", "--all-remedies"]],
    "explain": [["explain", "loss_spike"], ["explain"]],
    "formats": [["formats"]],
    "check": [["check", SAMPLE]],
    "preflight": [["preflight", SAMPLE]],
    "trial --list": [["trial", "--list"]],
}
SLOW = {
    "sweep": [["sweep", SAMPLE, "--rates", "0.3", "--steps", "3"]],
    "sweep --plan": [["sweep", SAMPLE, "--plan"]],
    "trial --plan": [["trial", SAMPLE, "--plan"]],
    "replay": [["replay", SAMPLE, "--step", "352", "--precision", "bf16"]],
    "precision": [["precision", SAMPLE]],
    "trial": [["trial", SAMPLE, "--fix", "lower_lr", "--seeds", "2", "--steps", "4"]],
}
OF_FILES = {
    "scan": [["scan", "a.safetensors"], ["scan", SAMPLE / "blackbox" / "snapshot-300.pt"]],
    "diff": [["diff", "a.safetensors", "b.safetensors"]],
    "audit-accumulation": [["audit-accumulation", "mine.py:pieces"]],
}


def assert_valid(name, words):
    "Validates what a command prints; returns it."
    done = command(*words, "--json")
    answer = json.loads(done.stdout)
    errors = list(Draft202012Validator(schema(name)).iter_errors(answer))
    causes = [error for e in errors for error in (e.context or [e])]
    assert not errors, [(error.json_path, error.message[:200]) for error in causes][:5]
    return answer


def test_each_command_with_json_has_a_schema():
    [commands] = [a.choices for a in make_parser()._actions if isinstance(a.choices, dict)]
    with_json = {name for name, p in commands.items() if "--json" in p._option_string_actions} - {"schema"}
    described = {name.split()[0] for name in schema_names()}
    assert with_json == described


def schema_names():
    "The commands that have one."
    return sorted(CALLS | SLOW | OF_FILES)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_quick_answer_is_valid(name):
    for words in CALLS[name]:
        assert_valid(name, words)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_an_answer_of_a_replay_or_a_trial_is_valid(name):
    for words in SLOW[name]:
        assert_valid(name, words)


def test_answers_about_files_are_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(AUDITED)
    save_file(
        {"weight": torch.ones(3, 2), "gone": torch.full((2,), float("nan"))}, tmp_path / "a.safetensors"
    )
    save_file({"weight": torch.zeros(3, 2), "new": torch.ones(1)}, tmp_path / "b.safetensors")
    for name, calls in OF_FILES.items():
        for words in calls:
            assert_valid(name, words)


@pytest.mark.slow
def test_every_kind_of_log_has_valid_answers(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "tests" / "logs")  # a long path stands three times in an answer
    for log in LOGS:
        if command("diagnose", log, "--json").returncode == 2:
            continue
        name = "diagnose"
        answer = assert_valid(name, ["diagnose", log])
        short = assert_valid("diagnose --brief", ["diagnose", log, "--brief"])
        text = command("diagnose", log, "--brief").stdout.rstrip("\n")
        assert len(text) <= 1500, (log.name, len(text))
        machine = command("diagnose", log.name, "--brief", "--json").stdout.strip()
        assert len(machine) <= 1500 or "runs" in short, (log.name, len(machine))
        if "runs" not in answer:
            cause = answer["most_likely"]
            words = cause["cause"] if cause else ""
            assert bool(short["cause"]) == bool(words) and words.startswith(short["cause"].removesuffix("…"))
            assert short["cause"].endswith("…") or short["cause"] == words
            assert len(short["findings"]) <= 3
    two = [shutil.copy(SAMPLE / "train.log", tmp_path / name) for name in ("a.log", "b.log")]
    assert len(assert_valid("diagnose", ["diagnose", *two])["runs"]) == 2
    assert len(assert_valid("diagnose --brief", ["diagnose", *two, "--brief"])["runs"]) == 2


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["diagnose", SAMPLE.parent / "lm_high_l"], "did you mean .*lm_high_lr"),
        (["diagnose", SAMPLE, "--briefly"], "stabilitylab diagnose --help"),
        (["replay", SAMPLE, "--step", "1"], "stabilitylab replay --help"),
        (["explain", "xyzzy"], "stabilitylab explain --help"),
    ],
)
def test_an_error_is_json_with_a_hint(words, hint):
    done = command(*words, "--json")
    answer = json.loads(done.stdout)
    Draft202012Validator({"$ref": "#/$defs/error", "$defs": schema()["$defs"]}).validate(answer)
    assert done.returncode == 2 and re.search(hint, answer["hint"]), answer


def test_a_key_that_goes_or_comes_is_seen():
    answer = json.loads(command("formats", "--json").stdout)
    is_valid = Draft202012Validator(schema("formats")).is_valid
    assert is_valid(answer)
    assert not is_valid({"formats": [answer["formats"][0] | {"colour": "red"}]})
    assert not is_valid({"formats": [{"name": "csv"}]})


@pytest.mark.slow
def test_the_brief_answer_in_json_has_what_its_text_has():
    answer = json.loads(command("diagnose", SAMPLE, "--brief", "--json").stdout)
    text = command("diagnose", SAMPLE, "--brief").stdout
    for step in (answer["first_sign"], answer["symptom_step"]):
        assert str(step) in text
    assert len(answer["around"]["rows"]) == 7 and answer["cause"] in text
    for line in answer["next"]:
        assert f"next: {line}" in text
        assert make_parser().parse_args(line.split()[1:]).func
    assert "tried (" not in text and not answer["remedies"]
    assert "tried (" in command("diagnose", SAMPLE, "--brief", "--all-remedies").stdout
