"""Asks the search of the built site what people type, and wants the right page among the first three.

python tests/docs/search.py: every phrase of every symptom, and those of tests/test_symptoms.py, after
tests/docs/build.py
"""

import shutil
import sys
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from stabilitylab.knowledge.symptoms import symptom, symptoms
from tests.test_symptoms import TYPED

SITE = Path(__file__).resolve().parents[2] / "_docs"
FIRST = 3  # results that a reader looks at


def answers(tab, phrase):
    "The paths of the first results, without anchors."
    tab.goto(f"{(SITE / 'search.html').as_uri()}?q={quote(phrase)}")
    summary = "document.querySelector('#search-results > p, #search-results .search-summary')?.textContent"
    tab.wait_for_function(f"{summary}?.match(/found|did not match/)")
    links = tab.eval_on_selector_all(
        "#search-results li a", "links => links.map(a => a.getAttribute('href'))"
    )
    return list(dict.fromkeys(link.partition("?")[0].partition("#")[0] for link in links))[:FIRST]


def misses():
    "Phrases whose page is not among the first results: (phrase, kind, what came)."
    own = [
        (phrase, kind)
        for kind in symptoms().index
        for phrase in (symptom(kind).title, *symptom(kind).aliases)
    ]
    wrong = []
    with sync_playwright() as p:
        tab = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"]).new_page()
        for phrase, kind in (*own, *TYPED.items()):
            came = answers(tab, phrase)
            if f"symptoms/{kind}.html" not in came:
                wrong.append((phrase, kind, came))
    return wrong


if __name__ == "__main__":
    if not shutil.which("chromium"):
        sys.exit("SKIPPED: no chromium, so the search was not asked")
    wrong = misses()
    print("\n".join(f"{phrase!r}: wanted {kind}, came {came}" for phrase, kind, came in wrong))
    print(
        f"{len(wrong)} phrases not answered" if wrong else "every phrase finds its page among the first three"
    )
    sys.exit(bool(wrong))
