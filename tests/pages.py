"""Run every page once and compare what it shows with what is stored: `python tests/pages.py [HALF|PATH …]`.

HALF is `fast` or `slow`: what `make test` and `make test-slow` run; without it every page.

It does what `nbdev_test` does, and looks at the outputs too. Words have to agree, numbers up to a tolerance:
another processor adds in another order. `ATEN_CPU_CAPABILITY=avx2` and `MKL_ENABLE_INSTRUCTIONS=AVX2` before
the command show the numbers of an older one. Pages that train a model, or that measure rounding noise, may
move further; they stand in `LOOSE` with the reason.

A page runs in a process of its own, forked from one in which the libraries are imported already: an import
costs more than most pages. A fork copies one thread only, so the first process must not have a second one.
"""

import base64
import functools
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pkgutil
import re
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKERS, LONGEST = 2, 600.0  # pages at a time; seconds that one may take
RTOL, ATOL = 2e-3, 1e-9  # a sum of 1e5 fp32 terms in another order moves by less

LOOSE = {  # page, or folder of pages -> (relative tolerance, reason[, absolute tolerance])
    "nbs/api/trial": (0.5, "each page trains models"),
    "nbs/api/investigation": (0.5, "replays a step and trains a trial"),
    "nbs/api/fixes": (0.5, "remedies are shown on short training runs"),
    "nbs/api/cases/10_layers.ipynb": (0.5, "trains a model a case"),
    "nbs/api/cases/21_states.ipynb": (0.5, "trains small models"),
    "nbs/api/replay": (0.2, "replays steps of a run that diverges; differences of rounding are noise"),
    "nbs/api/cli/14_replay.ipynb": (0.2, "replays steps of a run that diverges"),
    "nbs/api/probe": (0.1, "short training runs"),
    "nbs/tutorials/a_pure_bf16_run.ipynb": (0.2, "trains small models"),
    "nbs/tutorials/hugging_face_trainer.ipynb": (0.2, "trains a model at a rate that is too high"),
    "nbs/tutorials/test_a_fix.ipynb": (0.5, "trains a run that diverges"),
    "nbs/tutorials/torchrun_two_processes.ipynb": (0.2, "trains a model on bad inputs"),
    "nbs/tutorials/from_spike_to_culprit.ipynb": (0.2, "replays steps of a run that diverges"),
    "nbs/tutorials/record_your_next_run.ipynb": (0.1, "trains a model"),
    "nbs/explain": (0.1, "trains small models, and measures the noise of rounding"),
    "nbs/explain/how_often_a_verdict_is_wrong.ipynb": (
        0.1,
        "shares of 50 trials: 5 verdicts may change",
        0.1,
    ),
    "nbs/howto/replay_your_own_run.ipynb": (0.1, "trains a model and replays its steps"),
    "nbs/howto/which_batch.ipynb": (0.2, "replays steps of a run that diverges"),
    "nbs/howto/which_layers_in_fp32.ipynb": (0.2, "replays steps of a run that diverges"),
}
SLOW = (  # more than seven seconds each, for they train: `make test-slow` runs them, `make test` the others
    "nbs/tutorials/test_a_fix.ipynb",
    "nbs/api/cases/10_layers.ipynb",
    "nbs/api/cli/14_replay.ipynb",
    "nbs/api/trial/03_trial.ipynb",
    "nbs/api/investigation/02_loop.ipynb",
    "nbs/api/cli/18_trial.ipynb",
    "nbs/explain/spikes_of_rounding.ipynb",
    "nbs/tutorials/torchrun_two_processes.ipynb",
    "nbs/howto/replay_your_own_run.ipynb",
    "nbs/api/workbench/13_view_rounding.ipynb",
    "nbs/api/trial/09_sweep.ipynb",
    "nbs/api/workbench/11_setup_panel.ipynb",
    "nbs/api/workbench/12_view_checkpoints.ipynb",
    "nbs/api/probe/06_recorder.ipynb",
    "nbs/api/workbench/05_panel.ipynb",
    "nbs/explain/how_often_a_verdict_is_wrong.ipynb",
    "nbs/tutorials/a_pure_bf16_run.ipynb",
    "nbs/howto/which_batch.ipynb",
    "nbs/tutorials/hugging_face_trainer.ipynb",
    "nbs/howto/be_warned_before_the_loss.ipynb",
    "nbs/api/workbench/14_view_accumulation.ipynb",
    "nbs/howto/on_a_cluster.ipynb",
    "nbs/api/detect/91_likely_cause.ipynb",
    "nbs/tutorials/from_spike_to_culprit.ipynb",
    "nbs/api/investigation/01_plan.ipynb",
    "nbs/api/replay/13_faults.ipynb",
    "nbs/api/probe/attention/26_report.ipynb",
    "nbs/explain/pure_bf16_training.ipynb",
)
SLOWEST = (  # more than four seconds each; they begin first, so that the workers end together
    *SLOW,
    "nbs/api/probe/08_lightning.ipynb",
    "nbs/api/investigation/00_opening.ipynb",
    "nbs/api/cases/21_states.ipynb",
    "nbs/howto/beside_your_tracker.ipynb",
    "nbs/api/replay/12_retrace.ipynb",
    "nbs/api/probe/08_hf.ipynb",
    "nbs/api/replay/15_setup_file.ipynb",
    "nbs/explain/spike_rules.ipynb",
    "nbs/explain/results_reproduced.ipynb",
    "nbs/api/workbench/18_view_report.ipynb",
    "nbs/api/replay/14_setup_check.ipynb",
    "nbs/tutorials/record_your_next_run.ipynb",
    "nbs/api/probe/23_warning_action.ipynb",
    "nbs/api/probe/02_hooks.ipynb",
    "nbs/explain/attention_sinks.ipynb",
    "nbs/api/replay/01_step.ipynb",
    "nbs/api/probe/24_trackers.ipynb",
    "nbs/api/cases/00_lm_high_lr.ipynb",
    "nbs/api/trial/01_arm.ipynb",
    "nbs/api/replay/02_snapshot.ipynb",
)
LIBRARIES = (  # what pages import; `torch._dynamo` comes with every optimizer
    "execnb.shell",
    "nbdev.process",
    "torch",
    "torch._dynamo",
    "pandas",
    "xarray",
    "zarr",
    "scipy.stats",
    "matplotlib.pyplot",
    "matplotlib_inline.backend_inline",
    "ipywidgets",
    "anywidget",
)
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
SAME = (  # what may differ without a meaning -> what stands for it
    (r"data:image/png;base64,[\w+/=]+", "(picture)"),
    (r"0x[0-9a-fA-F]{6,}", "(address)"),
    (re.escape(str(ROOT)), "(checkout)"),
    (r"[-─=━]{3,}", "(rule)"),  # its length follows the numbers above it
    (r"\s+", " "),
)


@dataclass(frozen=True)
class Tolerance:
    "How far a number may be from the stored one."

    rtol: float = RTOL  # share of the stored value
    atol: float = ATOL  # absolute

    def allows(self, shown: str, stored: str) -> bool:
        "Whether two numbers, as they are printed, count as the same."
        ours, theirs = float(shown), float(stored)
        are_counts = re.fullmatch(r"[-+]?\d+", shown) and re.fullmatch(r"[-+]?\d+", stored)
        if are_counts and self.rtol <= RTOL:
            return ours == theirs
        last_digit = (
            10.0 ** -len(stored.partition(".")[2]) if "." in stored and "e" not in stored.lower() else 0
        )
        return abs(ours - theirs) <= max(self.atol, 1.001 * last_digit, self.rtol * abs(theirs))


def tolerance_of(page: Path) -> Tolerance:
    "What the table says of a page, or of the nearest folder."
    name = page.relative_to(ROOT).as_posix()
    keys = [key for key in LOOSE if name == key or name.startswith(key + "/")]
    rtol, _, *atol = LOOSE[max(keys, key=len)] if keys else (RTOL, "")
    return Tolerance(rtol, *atol)


def normal(text: str) -> str:
    "Text without what has no meaning for a reader."
    return functools.reduce(lambda out, rule: re.sub(*rule, out), SAME, text).strip()


def picture_size(png: str) -> str:
    "Width and height of a picture, from the head of the file."
    width, height = struct.unpack(">II", base64.b64decode(png)[16:24])
    return f"picture of {width} by {height}"


def shown(outputs: list[dict]) -> list[str]:
    "What a reader sees of a cell's outputs, one text each; streams of one kind are one."
    texts, streams = [], {}
    for output in outputs:
        if output["output_type"] == "stream":
            name = output["name"]
            streams[name] = streams.get(name, "") + "".join(output["text"])
            continue
        data = output.get("data", {})
        for kind in ("text/html", "text/markdown", "text/plain"):
            if kind in data:
                texts.append("".join(data[kind]))
                break
        if "image/png" in data:
            texts.append(picture_size("".join(data["image/png"])))
        if "ename" in output:
            texts.append(output["ename"])
    return [normal(text) for text in (*streams.values(), *texts) if normal(text)]


def difference(ours: str, theirs: str, tolerance: Tolerance) -> str:
    "How a shown text differs from the stored one; '' where it does not."
    words, stored_words = NUMBER.split(ours), NUMBER.split(theirs)
    if [w.strip() for w in words] != [w.strip() for w in stored_words]:
        pairs = zip(words, stored_words, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a.strip() != b.strip()), -1)
        return f"shows {words[at][:80]!r}, stored is {stored_words[at][:80]!r}"
    numbers = zip(NUMBER.findall(ours), NUMBER.findall(theirs), strict=True)
    wrong = [f"{a} (stored {b})" for a, b in numbers if a != b and not tolerance.allows(a, b)]
    return f"numbers moved: {', '.join(wrong[:4])}{' …' if len(wrong) > 4 else ''}" if wrong else ""


def compare(ours: list[dict], theirs: list[dict], tolerance: Tolerance) -> list[str]:
    "How the outputs of a cell differ from the stored ones."
    new, old = shown(ours), shown(theirs)
    if len(new) != len(old):
        return [f"shows {len(new)} outputs, stored are {len(old)}"]
    found = (difference(a, b, tolerance) for a, b in zip(new, old, strict=True))
    return [text for text in found if text]


def is_skipped(cell: dict) -> bool:
    "Cells that `nbdev_test` leaves out too."
    directives = getattr(cell, "directives_", None) or {}
    is_off = directives.get("eval:", [""])[0].lower() == "false"
    return cell.cell_type != "code" or "nbdev_export(" in cell.source or is_off or "slow" in directives


def run_page(page: Path) -> list[str]:
    "What is wrong with one page: an error, or outputs that differ."
    from execnb.shell import CaptureShell  # here, since these import NumPy, which counts its threads then
    from nbdev.frontmatter import FrontmatterProc
    from nbdev.process import NBProcessor

    os.environ["IN_TEST"] = "1"
    os.chdir(page.parent)
    notebook = NBProcessor(page, procs=FrontmatterProc, process=True).nb
    if str(getattr(notebook, "frontmatter_", {}).get("skip_exec", False)).lower() == "true":
        return []
    stored = {cell.idx_: list(cell.get("outputs", [])) for cell in notebook.cells if cell.cell_type == "code"}
    shell = CaptureShell(page)
    try:
        shell.run_all(notebook, exc_stop=True, preproc=is_skipped)
    except BaseException:  # the shell raises again whatever a cell raised, and the page has failed either way
        return [shell.prettytb(fname=page)]
    tolerance, wrong = tolerance_of(page), []
    for cell in notebook.cells:
        if not is_skipped(cell):
            found = compare(cell.get("outputs", []), stored[cell.idx_], tolerance)
            wrong += [f"cell {cell.idx_}: {text}" for text in found]
    return wrong


def child(page: Path, pipe: multiprocessing.connection.Connection) -> None:
    "One page in a process of its own."
    pipe.send(run_page(page))
    pipe.close()


@dataclass
class Running:
    "A page that is being run."

    page: Path
    process: multiprocessing.Process
    pipe: multiprocessing.connection.Connection
    begin: float

    def result(self) -> list[str] | None:
        "What is wrong with the page; None while it runs."
        if self.pipe.poll():
            try:
                return self.pipe.recv()
            except EOFError:
                self.process.join()
                return [f"its process ended with {self.process.exitcode}"]
        if time.monotonic() - self.begin < LONGEST:
            return None
        self.process.kill()
        return [f"still running after {LONGEST:.0f} s"]


def start(page: Path) -> Running:
    "Begin to run a page, in a copy of this process."
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(page, there))
    process.start()
    there.close()
    return Running(page, process, here, time.monotonic())


def warm_up() -> None:
    "Import once what the pages import; an error if that left a thread behind, which a fork would not copy."
    os.environ["OMP_NUM_THREADS"] = "1"  # as the stored outputs were made: threads add in another order
    sys.path.insert(0, str(ROOT))
    for name in LIBRARIES:
        importlib.import_module(name)
    package = importlib.import_module("stabilitylab")
    for module in pkgutil.walk_packages(package.__path__, "stabilitylab."):
        importlib.import_module(module.name)
    tasks = Path("/proc/self/task")
    names = [(task / "comm").read_text().strip() for task in tasks.iterdir()] if tasks.is_dir() else ["main"]
    if len(names) > 1:
        sys.exit(f"an import started threads ({', '.join(names)}), and a forked page would wait for them")
    importlib.import_module("pandas").set_option("display.max_colwidth", None)  # as in notebooks.py
    gc.freeze()  # the collector of a page leaves what was imported alone, and its memory stays shared


def indented(found: list[str]) -> str:
    "What is wrong with a page, set off from the lines of other pages; of a long text its end."
    lines = [line for text in found for line in text.splitlines()]
    return "\n".join(f"          {line}" for line in lines[-25:])


def run_all(pages: list[Path]) -> dict[Path, list[str]]:
    "Page -> what is wrong with it, for those with which something is."
    warm_up()
    waiting, running, wrong = list(pages), [], {}
    while waiting or running:
        while waiting and len(running) < WORKERS:
            running.append(start(waiting.pop(0)))
        multiprocessing.connection.wait([job.pipe for job in running], timeout=5)
        for job in list(running):
            found = job.result()
            if found is None:
                continue
            job.process.join()
            running.remove(job)
            name = job.page.relative_to(ROOT)
            print(f"{time.monotonic() - job.begin:6.1f} s  {name}", flush=True)
            if found:
                wrong[job.page] = found
                print(indented(found), flush=True)
    return wrong


def turn(page: Path) -> int:
    "When a page begins: the slowest first, the others in the order of their names."
    name = page.relative_to(ROOT).as_posix()
    return SLOWEST.index(name) if name in SLOWEST else len(SLOWEST)


def main(names: list[str]) -> None:
    "Run the pages at or below `names` and tell what is wrong with them."
    halves = {"fast": lambda page: page not in SLOW, "slow": lambda page: page in SLOW}
    in_half = halves.get(names[0], lambda page: True) if names else lambda page: True
    roots = [(ROOT / name).resolve() for name in names if name not in halves] or [ROOT / "nbs"]
    found = [page for root in roots for page in ([root] if root.is_file() else sorted(root.rglob("*.ipynb")))]
    pages = [p for p in found if not any(part.startswith((".", "_")) for part in p.relative_to(ROOT).parts)]
    pages = sorted((p for p in pages if in_half(p.relative_to(ROOT).as_posix())), key=turn)
    wrong = run_all(pages)
    if wrong:
        told = "\n".join(f"  {page.relative_to(ROOT)}\n{indented(found)}" for page, found in wrong.items())
        sys.exit(f"{len(wrong)} of {len(pages)} pages fail, or show something else than is stored:\n{told}")
    print(f"{len(pages)} pages ran and show what is stored")


if __name__ == "__main__":
    main(sys.argv[1:])
