"""Which mutants of the detectors' limits and conditions no behavioural test kills: `make mutants N=200`.

A mutant is a limit halved or doubled, a condition turned round, `and` in place of `or`, or one part of a
condition left out. Boundaries (`<` for `<=`) are none: a limit that moves is the stronger change. The well-
kept tools do not fit: they change no JSON, and start Python once a mutant, which costs more here than the
tests. So tests are collected and libraries imported once; each mutant is a fork of that process in which
the code of one function, or one limit, is replaced. Only tests that reach the changed line or read the
limit run, until one fails: the quick ones that meet little else first, as they are about it. Lessons of
the pages count as tests, run on the package.
"""

import argparse
import ast
import copy
import csv
import importlib
import json
import os
import pickle
import random
import re
import resource
import sys
import tempfile
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DETECT, PAGES, TABLE = ROOT / "stabilitylab/detect", ROOT / "nbs/api/detect", ROOT / "tests/mutants.csv"
COLUMNS = ("place", "mutant", "outcome", "by", "reason")
FILES = [
    f"test_{name}.py"
    for name in (
        "detect",
        "detect_limits",
        "detect_decisions",
        "detect_relations",
        "detect_facts",
        "detect_parts",
        "detect_layers",
        "quiet",
        "phrases",
        "own_logs",
        "wild_alarms",
        "routers",
        "restarts",
        "log_classes",
        "false_words",
        "swap_evidence",
        "strange_losses",
        "made_series",
        "zoo_records",
    )
]
NOT_BEHAVIOUR = (  # tests of the table of limits itself, which every other value fails
    "test_every_threshold_is_read",
    "test_limits_are_few",
    "test_limits_of_one_call",
    "01_limits.ipynb",
)
CALLS = 300  # of one function in one test, whose lines are noted
SECONDS = 15.0  # of processor time that the tests of one mutant may take together
PAIRS = ((ast.Lt, ast.GtE), (ast.LtE, ast.Gt), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
OPPOSITE = dict(PAIRS) | {b: a for a, b in PAIRS}
OTHER = {ast.And: ast.Or, ast.Or: ast.And}


@dataclass(frozen=True)
class Mutant:
    "One change of the detectors."

    place: str  # 'module.function', or 'limits.json'
    change: str  # 'old -> new'
    reaches: object  # a line as (file, number), or the name of a limit: tests that meet it run
    apply: Callable[[], None]  # makes the change in this process


def limit_mutants() -> Iterator[Mutant]:
    from stabilitylab.detect.limits import LIMITS

    for name, row in LIMITS.items():
        for factor in (0.5, 2):
            is_count = isinstance(row.value, int)
            value = max(1, round(row.value * factor)) if is_count else row.value * factor
            if value != row.value:
                changed = row._replace(value=value)
                apply = lambda name=name, changed=changed: LIMITS.update({name: changed})  # noqa: E731
                yield Mutant("limits.json", f"{name}: {row.value:g} -> {value:g}", name, apply)


def alternatives(node: ast.AST) -> Iterator[ast.expr]:
    "What may stand in place of a condition."
    match node:
        case ast.Compare(ops=[op]):
            yield ast.Compare(node.left, [OPPOSITE[type(op)]()], node.comparators)
        case ast.BoolOp(op=op, values=parts):
            yield ast.BoolOp(OTHER[type(op)](), parts)
            for left_out in range(len(parts)):
                rest = [part for i, part in enumerate(parts) if i != left_out]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.If(test=ast.Name() | ast.Call()) | ast.IfExp(test=ast.Name() | ast.Call()):
            yield ast.UnaryOp(ast.Not(), node.test)


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    "Functions and methods of a module by qualified name; what is nested in them is part of them."
    for node in tree.body:
        for child in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(child, ast.FunctionDef):
                yield (f"{node.name}.{child.name}" if child is not node else child.name), child


def code_named(code: types.CodeType, name: str) -> types.CodeType | None:
    "The code of one function among the constants of a module's code."
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_qualname == name:
                return constant
            if (inner := code_named(constant, name)) is not None:
                return inner
    return None


def replace_code(module: types.ModuleType, name: str, tree: ast.Module) -> None:
    "The function of this name runs what stands in `tree`, wherever it was imported to."
    function = module
    for part in name.split("."):
        function = vars(function)[part]
    for wrapper in ("func", "fget", "__func__", "__wrapped__"):
        function = getattr(function, wrapper, function)
    function.__code__ = code_named(compile(tree, module.__file__, "exec"), name)


def dotted(path: Path) -> str:
    "The module of a page or a file below the room of the detectors."
    return ".".join(["stabilitylab.detect", *path.parent.parts, re.sub(r"^\d+_", "", path.stem)])


def condition_mutants(path: Path) -> Iterator[Mutant]:
    module = importlib.import_module(dotted(path.relative_to(DETECT)))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for name, function in functions(tree):
        nodes = [node for part in function.body for node in ast.walk(part)]
        for node in nodes:
            for new in alternatives(node):
                old = node.test if isinstance(node, (ast.If, ast.IfExp)) else node
                ast.copy_location(new, old)

                def apply(old=old, new=new, name=name):
                    swap = {id(old): new}
                    mutated = Swap(swap).visit(tree)
                    replace_code(module, name, ast.fix_missing_locations(mutated))

                change = f"{ast.unparse(old)} -> {ast.unparse(new)}"
                yield Mutant(f"{path.stem}.{name}", change, (path.name, old.lineno), apply)


class Swap(ast.NodeTransformer):
    "Puts one expression in place of another; a fork needs no copy of the tree."

    def __init__(self, swap: dict[int, ast.expr]):
        self.swap = swap

    def visit(self, node: ast.AST) -> ast.AST:
        if id(node) in self.swap:
            return copy.copy(self.swap[id(node)])
        return self.generic_visit(node)


def lesson(page: Path) -> Callable[[], bool]:
    "Whether the lessons of a page fail; its exported cells are not run: names are those of the package."
    cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    skipped = ("#| export", "#| default_exp")
    kept = [s for s in sources if not s.startswith(skipped) and "nbdev_export" not in s]

    def fails() -> bool:
        names = dict(vars(importlib.import_module(dotted(page.relative_to(PAGES)))))
        os.chdir(page.parent)
        try:
            for source in kept:
                exec(compile(source, str(page), "exec"), names)
        except Exception:
            return True
        finally:
            os.chdir(ROOT)
        return False

    return fails


def test_of(item: pytest.Item) -> Callable[[], bool]:
    "Whether a test of pytest fails."
    from _pytest.runner import runtestprotocol

    return lambda: any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def forked(work: Callable[[], object], seconds: float) -> object:
    "What `work` returns in a fork of this process; None where it died or took more processor time."
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if not child:
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
            pickle.dump(work(), file)
            file.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        file.seek(0)
        return pickle.load(file) if status == 0 else None


class Reads(dict):
    "The table of limits that notes what is read of it."

    def __init__(self, limits: dict, noted: set):
        super().__init__(limits)
        self.noted = noted

    def __getitem__(self, name):
        self.noted.add(name)
        return super().__getitem__(name)


def reached(checks: dict[str, Callable[[], bool]]) -> dict[str, tuple[float, set]]:
    "By test that passes: its seconds, and the lines of the detectors and the limits that it meets."
    from stabilitylab.detect import limits

    noted: set = set()
    calls: Counter = Counter()
    limits.LIMITS = Reads(limits.LIMITS, noted)

    def of_line(frame, event, _):
        noted.add((Path(frame.f_code.co_filename).name, frame.f_lineno))
        return of_line

    def of_call(frame, event, _):
        if "/stabilitylab/detect/" not in frame.f_code.co_filename:
            return None
        calls[frame.f_code] += 1  # a function that a test calls so often has shown its lines
        return of_line if calls[frame.f_code] <= CALLS else None

    results = {}
    for name, fails in checks.items():
        noted.clear()
        calls.clear()
        sys.settrace(of_call)
        began = time.process_time()
        failed = fails()
        took = time.process_time() - began
        sys.settrace(None)
        if failed:
            print(f"left out, as it fails without a mutant: {name}", file=sys.__stderr__, flush=True)
        else:
            results[name] = (took, set(noted))
    return results


def outcome(mutant: Mutant, checks: dict, reach: dict[str, tuple[float, set]]) -> tuple[str, str]:
    "(outcome, the test that killed it)."
    # a test that meets few lines is about them: by seconds alone, those that pass by would use up the time
    meets = {name: took * len(met) for name, (took, met) in reach.items() if mutant.reaches in met}
    meeting = [(reach[name][0], name) for name in sorted(meets, key=meets.__getitem__)]
    if not meeting:
        return "not reached", ""
    sum_of, chosen = 0.0, []
    for took, name in meeting:
        sum_of += took
        if sum_of <= SECONDS or not chosen:
            chosen.append(name)

    def run() -> str:
        mutant.apply()
        return next((name for name in chosen if checks[name]()), "")

    killer = forked(run, 3 * SECONDS)
    if killer is None:
        return "killed", "time limit"
    return ("killed", str(killer)) if killer else ("survived", "")


class Mutants:
    "In place of running the collected tests once: run them on every mutant."

    def __init__(self, sample: int, seed: int, only: str, minutes: float):
        self.sample, self.seed, self.only, self.minutes = sample, seed, only, minutes

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        warnings.simplefilter("ignore")
        checks = {page.name: lesson(page) for page in sorted(PAGES.rglob("*.ipynb"))}
        checks |= {item.name: test_of(item) for item in session.items}
        checks = {name: c for name, c in checks.items() if not name.startswith(NOT_BEHAVIOUR)}
        modules = [path for path in sorted(DETECT.rglob("*.py")) if path.stem not in ("__init__", "limits")]
        mutants = [*limit_mutants(), *(m for path in modules for m in condition_mutants(path))]
        chosen = [m for m in mutants if re.search(self.only, m.place + ":" + m.change)]
        order = {(m.place, m.change): i for i, m in enumerate(mutants)}
        random.Random(self.seed).shuffle(chosen)  # where time runs out, what was tried is a fair sample too
        chosen = chosen[: self.sample or None]
        began = time.monotonic()
        reach = forked(lambda: reached(checks), 3600)
        print(f"{len(chosen)} of {len(mutants)} mutants, {len(reach)} of {len(checks)} tests", flush=True)
        rows = []
        for mutant in chosen:
            if time.monotonic() - began > 60 * self.minutes:
                break
            result, killer = outcome(mutant, checks, reach)
            rows.append(dict(zip(COLUMNS, (mutant.place, mutant.change, result, killer, ""), strict=True)))
            if result != "killed":
                print(result, mutant.place, mutant.change, sep=" | ", flush=True)
        rows.sort(key=lambda row: order[row["place"], row["mutant"]])
        killed = sum(row["outcome"] == "killed" for row in rows)
        if not rows:
            print(f"no mutant was tried in {self.minutes:g} minutes: finding the tests of each line took all")
            return True
        print(f"{killed} of {len(rows)} killed: {killed / len(rows):.0%}")
        if not self.only:
            store(rows)
        return True


def store(rows: list[dict]) -> None:
    "The table, with the reasons that were written into the one before."
    old = csv.DictReader(TABLE.open(encoding="utf-8")) if TABLE.exists() else ()
    reasons = {(row["place"], row["mutant"]): row["reason"] for row in old if row["outcome"] != "killed"}
    for row in rows:
        if row["outcome"] != "killed":
            row["reason"] = reasons.get((row["place"], row["mutant"]), "")
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=200, help="so many mutants, the same each time; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--minutes", type=float, default=10, help="no further mutant is tried after so many")
    parser.add_argument(
        "--only", default="", help="those whose 'place:change' this pattern matches; nothing is stored"
    )
    chosen = parser.parse_args()
    files = [str(path) for name in FILES if (path := ROOT / "tests" / name).exists()]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow or findings", *files]
    sys.exit(pytest.main(options, plugins=[Mutants(chosen.sample, chosen.seed, chosen.only, chosen.minutes)]))


if __name__ == "__main__":
    main()
