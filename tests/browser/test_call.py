"""The button that copies a call, in a page of its own."""

import json

import pytest

from stabilitylab.workbench.parts import CallLine

CALL = 'run = read_log("train.log")\nplot_findings(run)'
PAGE = """
<style>%(css)s</style><div id="place" style="width: 900px"></div>
<script type="module">
const script = new Blob([%(script)s], { type: 'text/javascript' });
let call = %(call)s, heard = null;
if (%(is_bare)s) Object.defineProperty(navigator, 'clipboard', { value: undefined });
document.addEventListener('copy', () => { window.copied = getSelection().toString(); });
window.become = (text) => { call = text; heard(); };
window.said = [];
const hear = new MutationObserver(() => window.said.push(document.querySelector('button').textContent));
hear.observe(document.getElementById('place'), { childList: true, subtree: true, characterData: true });
const { default: widget } = await import(URL.createObjectURL(script));
const model = { get: () => call, on: (name, act) => { heard = act; } };
widget.render({ model, el: document.getElementById('place') });
window.ready = true;
</script>
"""


def opened(browser_alone, is_bare):
    page = browser_alone.new_page(viewport={"width": 900, "height": 400})
    told = {"script": str(CallLine._esm), "call": CALL, "is_bare": is_bare}
    page.set_content(PAGE % {"css": CallLine._css, **{name: json.dumps(text) for name, text in told.items()}})
    page.wait_for_function("window.ready", timeout=30_000)
    return page


@pytest.mark.parametrize("is_bare", [False, True])
def test_the_call_is_copied_with_and_without_a_clipboard(browser_alone, is_bare):
    page = opened(browser_alone, is_bare)
    page.focus("button")
    page.keyboard.press("Enter")
    page.wait_for_function("said.some(words => ['Copied', 'Press Ctrl+C'].includes(words))", timeout=30_000)
    if is_bare or page.evaluate("window.copied !== undefined"):
        chosen = page.evaluate("getSelection().toString()")
        assert chosen.strip() == CALL, chosen
    page.wait_for_selector('button:text-is("Copy the call")', timeout=30_000)
    if not page.locator("pre").is_visible():
        page.click("summary")
    assert page.inner_text("pre") == CALL
    page.evaluate("window.become('')")
    assert not page.locator("button").is_visible()
    page.close()
