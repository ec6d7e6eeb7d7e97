"Every sentence of the findings, filled with every awkward number: no plural of one, no digits by the dozen."

import itertools
import re
import string

import pytest

from stabilitylab.detect.findings import MODULE_PHRASES, PHRASES, Finding, explain
from stabilitylab.names.words import format_count, format_number

NUMBERS = (0, 1, 2, 1.0, 0.5, 12345, 26_314_000.0, 3.7e39, 10**39, "inf", "nan")
WORDS = {
    "recovery": ("fast", "slow", "partial", "none"),
    "ended": (True, False, "outside"),
    "stays": (True, False),
    "is_copy": (True, False),
    "all_steps_skipped": (True, False),
}
TEXTS = ("name", "cause", "message", "time", "then", "note", "what", "kind", "format", "likely_cast", "role")
TEXTS += ("token", "near", "explains", "changed", "shape", "words", "series")
PLURAL_OF_ONE = re.compile(
    r"(?<![\d.,])1 (?!of\b|is\b|has\b)\w*(?:step|place|record|parameter|module|rank|run)s\b"
)


def holes():
    "Every hole of every phrase, those inside coded words too."
    from stabilitylab.detect import findings

    told = [*itertools.chain(*PHRASES.values(), *MODULE_PHRASES.values())]
    told += [words for coded in findings._CODED.values() for words in coded["words"].values()]
    names = {name for text in told for _, name, _, _ in string.Formatter().parse(text) if name}
    fields = names | {coded["of"] for coded in findings._CODED.values()}
    return sorted(fields - set(findings._CODED))


def evidence(number, choice):
    "Every field with this number, or with a word where it holds words."
    filled = {name: number for name in holes() if name not in ("onset", "end", "module", "names_words")}
    filled |= {name: "words" for name in TEXTS if name in filled}
    filled |= {name: values[choice % len(values)] for name, values in WORDS.items()}
    return filled | {"names": ["a", "b"]}


WRONG = {  # what no sentence may hold
    "digits by the dozen": re.compile(r"\d{16}|(\d{1,3},){5}|\d{5}\.\d"),
    "a plural of one": PLURAL_OF_ONE,
    "a count that says nothing": re.compile(
        r"\b0 steps (later|earlier)|after 0 |\b(inf|NaN) times its usual"
    ),
    "a hole, a gap or two full stops": re.compile(r"\{|  |\.\.|[^.]\Z"),
}


@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_words_of_a_finding(number):
    step = number if isinstance(number, int) and number < 2**62 else 7
    wrong = []
    for choice in range(4):
        fields = evidence(number, choice)
        for kind, modules in itertools.product(sorted({*PHRASES, *MODULE_PHRASES}), ((), ("blocks.0.fc1",))):
            told = explain(Finding(kind, "warning", step, modules=modules, evidence=fields))
            wrong += [f"{kind}: {why}: {told}" for why, pattern in WRONG.items() if pattern.search(told)]
    assert not wrong, "\n".join(wrong)


def test_a_sentence_that_is_wrong_is_seen():
    for told in (
        "1 steps.",
        "0 steps later.",
        "{n} steps.",
        "two  gaps.",
        "ends..",
        "no end",
        "1234567890123456.",
    ):
        assert any(pattern.search(told) for pattern in WRONG.values()), told
    assert not any(pattern.search("At step 7 the loss rose by 12,345.") for pattern in WRONG.values())


def test_numbers_for_a_reader():
    assert [format_number(n) for n in (26_314_000.0, 1e40, 10**40, 0, 999.96)] == [
        "26.31 million",
        "1e+40",
        "1.000e+40",
        "0",
        "1,000",
    ]
    assert [format_count(n, "step") for n in (0, 1, 1.0, 2)] == ["0 steps", "1 step", "1 step", "2 steps"]
    assert format_count(1, "matrix has|matrices have") == "1 matrix has"


def test_a_gradient_norm_26_million_times_its_usual_is_a_warning_in_words():
    import numpy as np

    from stabilitylab import diagnose
    from stabilitylab.run.record import new_run
    from stabilitylab.run.scalars import Samples, make_scalars

    norm = np.exp(np.random.default_rng(0).normal(0, 0.1, 400))
    norm[300] = 26e6
    (found,) = diagnose(new_run(make_scalars({"grad_norm": Samples(np.arange(400), norm)})))
    assert found.severity == "warning" and "million times its usual" in found.explanation
