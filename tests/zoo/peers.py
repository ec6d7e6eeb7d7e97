"""What runmedic and trainscope say of the logs of the zoo: `make zoo PEERS=PYTHON`, one that imports them.

That Python runs this file with a CSV of each run and needs no stabilitylab. Neither peer ranks causes, so
scored is whether it warns of a failing run and not of a healthy one.
"""

import csv
import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path


def runmedic(path):
    "Checks that are warnings or critical."
    from runmedic import loaders, roles
    from runmedic.checks import run_checks

    told = [found for run in loaders.load(str(path)) for found in run_checks(run, roles.detect(run, {}))]
    return [f.check for f in told if f.severity != "info"]


def trainscope(path, name):
    "The first step at which a detector fired on the loss."
    from trainscope.core.detectors import make_detector

    with open(path) as file:
        rows = [(row["step"], float(row["loss"])) for row in csv.DictReader(file)]
    detector = make_detector({"name": name})
    return [step for step, loss in rows if math.isfinite(loss) and detector.update(loss) is not None][:1]


DETECTORS = ("changepoint", "z_score", "percentile")  # of trainscope; the first is its default
PEERS = {"runmedic": runmedic} | {f"trainscope {name}": partial(trainscope, name=name) for name in DETECTORS}


def write_log(record, path):
    "The log of a recorded run, as a trainer would have written it."
    from stabilitylab import open_run

    scalars = open_run(record)["scalars"]
    columns = [
        name for name in ("loss", "lr", "grad_norm") if name in scalars and scalars[name].dims == ("step",)
    ]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *columns])
        writer.writerows(zip(scalars.step.values, *(scalars[name].values for name in columns), strict=True))
    return path


def ask(python, logs):
    "Peer -> stem of a log -> what it told; a text where it cannot be imported."
    command = [python, __file__, *map(str, logs)]
    return json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
    )


def peer_summary(answers, causes):
    "A line a peer; `causes` holds the true cause of each log, '' where the run is healthy."
    failing, healthy = ([log for log, cause in causes.items() if bool(cause) is bad] for bad in (True, False))
    for peer, told in answers.items():
        if isinstance(told, str):
            yield f"{peer}: {told}"
            continue
        warned, quiet = sum(bool(told[log]) for log in failing), sum(not told[log] for log in healthy)
        yield f"{peer}: warned of {warned}/{len(failing)} failing, quiet on {quiet}/{len(healthy)} healthy"


if __name__ == "__main__":
    answers = {}
    for peer, told_of in PEERS.items():
        try:
            answers[peer] = {Path(log).stem: told_of(log) for log in sys.argv[1:]}
        except ImportError as error:
            answers[peer] = f"not importable there ({error})"
    print(json.dumps(answers))
