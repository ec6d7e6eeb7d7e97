"Reports of runs with hostile names, broken values and many findings: strict, escaped, self-contained."

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from stabilitylab.detect.diagnose import finish
from stabilitylab.detect.findings import Finding, Findings
from stabilitylab.detect.likely_cause import most_likely
from stabilitylab.names.words import FINDING_KINDS, clean, number
from stabilitylab.report.brief import brief
from stabilitylab.report.content import in_full_and_listed
from stabilitylab.report.html import report_html, write_html
from stabilitylab.report.step import replay_html
from stabilitylab.report.terminal import findings_text, run_json, run_markdown, run_text, runs_json
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_events, make_scalars

EVIL = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "'--><svg onload=alert(3)>",
    "$\\frac{",
    "\x1b[31m\x1b]0;t\x07",
    "</style><b>",
    '&amp;<a href="javascript:x">',
    "]]>",
]


def make_run(names=("loss",), n=200, source="train.log", **kw):
    v = 2 + 2 * np.exp(-np.arange(n) / 40)
    return new_run(
        make_scalars(
            {f"s{i}" if i else "loss": Samples(np.arange(n), v) for i in range(len(names))},
            {f"s{i}" if i else "loss": s for i, s in enumerate(names)},
        ),
        {"source": source, "format": "nanogpt"} | kw,
        events=make_events([("note", 3, s) for s in EVIL]),
    )


def hostile():
    run = make_run(EVIL, source="/data/" + EVIL[0].replace("/", "_"), skipped={EVIL[1]: 3})
    findings = Findings(
        finish(
            [
                Finding(
                    "loss_spike",
                    "error",
                    5,
                    9,
                    modules=(EVIL[0],),
                    evidence={EVIL[1]: EVIL[2], "peak": np.inf},
                    explanation=" ".join(EVIL),
                    series="loss",
                )
            ]
        )
    )
    return run, findings


class Parsed(HTMLParser):
    "Tags and attributes of a page, with a check that it is well nested."

    VOID = frozenset({"meta", "br", "img", "link"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.attrs, self.open, self.words = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attrs += [(tag, *a) for a in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attrs += [(tag, *a) for a in attrs]

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        self.words.append(data)


def test_words_of_a_log_never_become_markup():
    run, findings = hostile()
    page = report_html({"a": run, EVIL[1]: run}, {"a": findings, EVIL[1]: findings}, findings)
    p = Parsed(page)
    assert not p.open and not {"script", "img", "iframe", "object", "link", "b"} & set(p.tags)
    assert not [
        a
        for a in p.attrs
        if a[1].startswith("on") or (a[1] in ("href", "src") and a[2].strip().startswith("javascript"))
    ]
    assert "<script>alert(1)</script>" in "".join(p.words), "the words are still there to be read"
    assert "\x1b" not in page


def test_the_page_needs_nothing_from_outside():
    run, findings = hostile()
    page = report_html({"a": run}, {"a": findings})
    refs = [a for a in Parsed(page).attrs if a[1] in ("href", "src", "xlink:href")]
    assert all(a[2].startswith("#") for a in refs), refs
    assert "@import" not in page and "url(http" not in page and "default-src 'none'" in page


def test_ids_are_unique_and_references_resolve():
    run, findings = hostile()
    p = Parsed(report_html({"a": run, "b": make_run()}, {"a": findings, "b": findings}, findings))
    ids = [a[2] for a in p.attrs if a[1] == "id"]
    targets = {a[2][1:] for a in p.attrs if a[1] in ("href", "xlink:href")} | {
        m for a in p.attrs if a[2] for m in re.findall(r"url\(#([^)]+)\)", a[2])
    }
    assert targets <= set(ids)
    double = {i for i in ids if ids.count(i) > 1}
    assert not {i for i in double if re.match(r"[rsf]", i)}, double


def test_skipped_lines_are_counted_in_every_report(tmp_path):
    run = make_run(skipped={"cut last line": 1234})
    assert "1,234 × cut last line" in run_text(run, Findings())
    assert "1,234 × cut last line" in write_html(run, Findings(), tmp_path / "r.html").read_text(
        encoding="utf-8"
    )
    assert "1,234 × cut last line" in run_markdown(run, Findings())


def test_a_run_that_ends_in_nan_says_so_in_its_first_line():
    loss = np.r_[np.linspace(4, 2, 40), np.full(20, np.nan)]
    run = new_run(scalars=make_scalars({"loss": Samples(np.arange(60), loss)}))
    text = run_text(run, Findings())
    assert "loss 4 → NaN (last finite 2, lowest 2)" in text
    well = new_run(scalars=make_scalars({"loss": Samples(np.arange(40), loss[:40])}))
    assert "loss 4 → 2 (lowest 2)" in run_text(well, Findings())
    never = new_run(scalars=make_scalars({"loss": Samples(np.arange(60), np.full(60, np.inf))}))
    assert "loss never finite" in run_text(never, Findings())
    assert "loss never finite" in brief(never, Findings()).text()


def test_a_log_is_not_told_to_replay_before_it_is_recorded():
    log = Findings([Finding("non_finite", "error", 5, 9, evidence={"stays": True}, series="loss")])
    recorded = Findings(log)
    recorded.attrs["evidence"] = {}
    first, second = (most_likely(findings).next for findings in (log, recorded))
    assert first[0].startswith("Resume") and "Recorder" in first[0] and first[1:] == second


def test_every_kind_can_be_told():
    findings, run = Findings(finish([Finding(kind, "warning", 3) for kind in FINDING_KINDS])), make_run()
    text, page = run_text(run, findings), report_html({"a": run}, {"a": findings})
    for kind in FINDING_KINDS:
        assert kind in text and kind.replace("_", " ") in page
    assert {
        f["kind"] for f in json.loads(json.dumps(run_json(run, findings), allow_nan=False))["findings"]
    } == set(FINDING_KINDS)


def test_json_of_broken_numbers_is_strict():
    f = Findings(
        [Finding("loss_spike", evidence={"a": np.nan, "b": -np.inf, "c": [np.float32("inf"), {"d": np.nan}]})]
    )
    told = json.loads(json.dumps(runs_json([run_json(make_run(), f)], f), allow_nan=False))
    for got in (told["runs"][0]["findings"][0], told["shared"][0]):
        assert (
            got["evidence"] == {"a": "nan", "b": "-inf", "c": ["inf", {"d": "nan"}]} and got["onset"] is None
        )


def test_a_hundred_spikes_stay_readable():
    f = Findings(
        [Finding("loss_spike", "warning", s, explanation="Up.") for s in range(100)]
        + [Finding("divergence", "error", 50, explanation="Gone.")]
    )
    text = run_text(make_run(), f, width=90)
    assert (
        len(text.splitlines()) < 40
        and "96 more loss_spike" in text
        and text.index("divergence") < text.index("loss_spike")
    )
    told, listed = in_full_and_listed(f)
    assert len(told) + sum(map(len, listed.values())) == len(f)
    page = report_html({"a": make_run()}, {"a": f})
    assert "96 more: loss spike" in page and len(page) < 1_000_000


@pytest.mark.parametrize("width", [40, 72, 100, 200])
def test_lines_keep_to_the_width(width):
    f = Findings(finish([Finding("divergence", "error", 50, explanation="word " * 80)]))
    body = [s for s in findings_text(f, width).splitlines() if s.startswith(" " * 13)]
    assert body and max(map(len, body)) <= max(width, 40)


@pytest.mark.parametrize(
    "run",
    [
        make_scalars({}),
        make_scalars({"loss": Samples(np.zeros(0, int), np.zeros(0))}),
        make_scalars({"loss": Samples(np.array([5]), np.array([np.nan]))}),
        make_scalars({"other": Samples(np.arange(3), np.array([0.0, -1, 0]))}),
        make_scalars({"loss": Samples(np.arange(4), np.full(4, np.inf))}),
    ],
    ids=["no series", "no values", "one NaN", "no loss", "all inf"],
)
def test_odd_runs_have_reports_too(run):
    run = new_run(run, {"format": "x"})
    assert (
        run_text(run, Findings())
        and run_markdown(run, Findings())
        and "</html>" in report_html({"a": run}, {"a": Findings()})
    )
    json.dumps(run_json(run, Findings()), allow_nan=False)


@pytest.mark.parametrize(
    "value, words",
    [
        (0.0, "0"),
        (1234567, "1,234,567"),
        (1e-12, "1e-12"),
        (123456.789, "123,456.8"),
        (True, "yes"),
        (None, "None"),
        ({"a": 1.5}, "a: 1.5"),
        (-np.inf, "-inf"),
    ],
)
def test_numbers(value, words):
    assert number(value) == words


def test_clean_takes_control_characters_and_direction_marks_away():
    assert clean("a\u202eb\x00c\nd") == "a b c d" and len(clean("x" * 1000)) == 300


def test_the_same_run_gives_the_same_page():
    run, findings = hostile()
    assert report_html({"a": run}, {"a": findings}) == report_html({"a": run}, {"a": findings})


def test_the_words_of_a_swap_test_are_a_sentence_in_the_replay_view():
    numbers = {
        "step": 4,
        "loss": 2.0,
        "recorded_loss": None,
        "exact": None,
        "grad_norm": 1.0,
        "update_norm": 0.1,
    }
    swap = {"verdict": "bad batch", "words": "the batch is out of line from every state"}
    page = replay_html(numbers | {"swap": swap}, "head")
    assert "The batch is out of line from every state." in re.sub("<[^>]+>", "", page)
