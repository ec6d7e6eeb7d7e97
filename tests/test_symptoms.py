"The page of every finding kind: complete, and found by the words that people type."

import json
import re

import pytest

from stabilitylab.cli.main import make_parser
from stabilitylab.fixes.registry import fixes
from stabilitylab.knowledge.remedies import remedies_for
from stabilitylab.knowledge.symptoms import symptom, symptoms
from stabilitylab.names.errors import InputError
from stabilitylab.names.words import FINDING_KINDS
from tests.command import command
from tests.notebooks import ROOT

TYPED = {  # what people type -> the finding that answers
    "loss is NaN": "non_finite",
    "loss spikes": "loss_spike",
    "loss stuck at 10.8": "not_learning",
    "grad norm explodes": "grad_norm_explosion",
    "loss jumps after resume": "resume_spike",
    "only a few loss values": "quantized_loss",
    "batch size 1×32 is worse than 32": "accumulation_bias",
    "loss scale keeps halving": "loss_scale_collapse",
    "NCCL timeout": "crash",
    "Xid error": "hardware_error",
    "validation loss goes up": "overfitting",
    "entropy collapse in GRPO": "policy_entropy_collapse",
    "approx_kl spikes": "policy_step_too_large",
    "loss went through the roof": "divergence",
    "nan after 3 epochs amp": "non_finite",
    "nccl allreduce timed out": "crash",
    "job died, no traceback": "crash",
    "oom after 10 hours": "memory_growth",
    "huge spike then recovers": "loss_spike",
    "grad_norm 1e6": "grad_norm_explosion",
    "gnorm exploding": "grad_norm_explosion",
    "steps got 2x slower after a day": "throughput_drop",
    "after restart the loss is worse": "resume_spike",
    "scaler keeps reducing": "loss_scale_collapse",
    "model isn't learning anything": "not_learning",
    "loss curve flattened out": "plateau",
    "peak lr too aggressive": "lr_too_high",
    "warmup too short diverges": "lr_too_high",
    "same config different results": "environment_change",
    "dataloader bottleneck": "data_stall",
    "GPU fell off the bus": "hardware_error",
}


@pytest.mark.parametrize("words, kind", TYPED.items())
def test_what_people_type_finds_its_page(words, kind):
    assert symptom(words).kind == kind
    assert symptom(f"Why is the {words.lower()}?").kind == kind


def test_every_kind_has_a_page_and_every_phrase_leads_to_it():
    assert list(symptoms().index) == list(FINDING_KINDS)
    for kind in FINDING_KINDS:
        one = symptom(kind)
        assert one.kind == kind
        for phrase in (one.title, *one.aliases):
            assert symptom(phrase).kind == kind, phrase


def test_a_page_is_whole_and_needs_no_table():
    commands = {choice for a in make_parser()._actions if isinstance(a.choices, dict) for choice in a.choices}
    for kind in FINDING_KINDS:
        one = symptom(kind)
        text = one.markdown
        assert one.looks and one.causes and 2 <= len(one.do) <= 4 and one.test and one.cannot, kind
        assert all(row["cause"] and row["tell"] for row in one.causes), kind
        assert "|" not in text and text.count("\n## ") >= 4, kind
        assert all(row["name"] in text for row in remedies_for(kind, 3)), kind
        assert set(re.findall(r"`stabilitylab ([\w-]+)", text)) <= commands, kind
        assert set(re.findall(r"--fix (\w+)", text)) <= set(fixes().name), kind
        assert all((ROOT / "nbs" / page).is_file() for page in one.see), kind


def test_a_page_begins_with_what_can_be_run_and_has_a_figure():
    for kind in FINDING_KINDS:
        first = symptom(kind).markdown.partition("## What to do\n\n1. ")[2].partition("\n")[0]
        assert re.match("Run `stabilitylab (diagnose|audit-accumulation) ", first), kind
    pictures = {file.stem for file in (ROOT / "nbs/images/symptoms").glob("*.png")}
    # a question to a model, and a shape: in no curve
    assert set(FINDING_KINDS) - pictures == {"output_collapse", "misaligned_shape"}


def test_words_of_nothing_name_the_nearest():
    with pytest.raises(InputError, match=r"symptoms\(\) lists all"):
        symptom("the printer is out of paper")
    with pytest.raises(InputError, match="symptom"):
        symptom("")


def test_the_command_prints_the_page_and_its_data():
    one, page = symptom("non_finite"), command("explain", "loss", "is", "NaN")
    words = re.sub(r"\s+", " ", page.stdout)
    assert page.returncode == 0 and one.title in words and one.cannot in words
    assert "](" not in words and "**" not in words
    addresses = [url for url in re.findall(r"\]\((https?[^)]+)\)", one.markdown)]
    assert addresses and all(page.stdout.count(f" {url}\n") == 1 for url in set(addresses))
    assert json.loads(command("explain", "non_finite", "--json").stdout)["title"] == one.title
    every = command("explain")
    assert every.returncode == 0 and all(kind in every.stdout for kind in FINDING_KINDS)
    unknown = command("explain", "the", "printer")
    assert unknown.returncode == 2 and "Traceback" not in unknown.stderr
