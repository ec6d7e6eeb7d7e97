"""Setups of the sample run that wait where a test has to see work half done.

A child process stands still until the test makes a file beside the setup, or for good where it is stopped.
"""

from pathlib import Path

SETUP = """"The sample's own setup, which waits for files beside this one."
import time
from dataclasses import replace
from pathlib import Path

from stabilitylab.cases.lm_high_lr import replay_setup

GATES = {40: "first", 80: "second"}  # steps of an arm -> the file that it waits for there


def wait(name):
    "Until the file is there; a page that is gone is not waited for."
    for _ in range(6000):
        if (Path(__file__).parent / name).exists():
            return
        time.sleep(0.05)
    raise TimeoutError(name)


def never(path):
    "Waits until it is stopped."
    wait("never")


def stepwise(path):
    "Every arm waits before some of its steps."
    setup, taken = replay_setup(path), [0]

    def loss(model, batch):
        taken[0] += 1
        if taken[0] in GATES:
            wait(GATES[taken[0]])
        return setup.loss(model, batch)

    return replace(setup, loss=loss)
"""


def written(folder: Path) -> Path:
    "The file of these setups, in a folder where nothing is open yet."
    file = folder / "waiting_setup.py"
    file.write_text(SETUP)
    return file
