"""A figure for the page of each symptom: a made failure of its kind with the finding marked.

python tests/docs/figures.py [KIND ...]: writes nbs/images/symptoms/KIND.png, for all kinds or these
"""

import base64
import io
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import xarray as xr

from stabilitylab.cases.registry import case, cases
from stabilitylab.detect.diagnose import as_run, diagnose
from stabilitylab.detect.findings import Findings
from stabilitylab.names.findings import FINDING_KINDS
from stabilitylab.plot.findings import plot_findings
from tests.notebooks import small_picture

FOLDER = Path(__file__).resolve().parents[2] / "nbs" / "images" / "symptoms"


def figure(kind):
    "The PNG of a kind's quickest case that is one run; b'' where the finding does not stand in a curve."
    for name in cases(kind).sort_values("seconds").index:
        run = case(name, 0)
        if not isinstance(run, xr.Dataset | xr.DataTree):
            continue
        run = as_run(run)
        found = [f for f in diagnose(run) if f.kind == kind]
        if not found:
            continue
        plot_findings(run, Findings(found[:1]))
        out = io.BytesIO()
        plt.gcf().savefig(out, dpi=110, bbox_inches="tight")
        plt.close("all")
        return base64.b64decode(small_picture(base64.b64encode(out.getvalue()).decode()))
    return b""


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for kind in sys.argv[1:] or FINDING_KINDS:
        try:
            picture = figure(kind)
        except Exception as error:  # a run without a loss has no curve
            print(f"{kind}: {error!r}"[:150])
            continue
        if picture:
            (FOLDER / f"{kind}.png").write_bytes(picture)
        print(f"{kind}: {len(picture):,} bytes", flush=True)
