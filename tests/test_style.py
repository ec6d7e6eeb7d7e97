"""The form of the exported package, counted so that no line width can hide it."""

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "stabilitylab"
SOURCES = {
    path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "_modidx.py"
}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}

WIDEST = 110  # characters of a line
MOST_BRANCHES = 15  # decisions of a function
PRIVATE_ANNOTATED = 0.8  # share of the parameters of private functions
ONE_LETTER = 0.15  # share of the assigned names

LOOPS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DECISIONS = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.comprehension, ast.Assert)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    "Every function of a module, those inside others too."
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    "The named parameters of a function, without the object itself."
    named = function.args
    every = itertools.chain(named.posonlyargs, named.args, named.kwonlyargs)
    return [parameter for parameter in every if parameter.arg not in ("self", "cls")]


def decisions(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    "How often the course of a function can part: an `and` of three conditions counts twice."
    nodes = list(ast.walk(function))
    parts = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    return parts + sum(isinstance(node, DECISIONS) for node in nodes)


def nested(tree: ast.AST) -> Iterator[int]:
    "Lines with a ternary inside a ternary, or a comprehension inside a comprehension."
    for kind in ((ast.IfExp,), LOOPS):
        for outer in ast.walk(tree):
            if isinstance(outer, kind):
                yield from (n.lineno for n in ast.walk(outer) if isinstance(n, kind) and n is not outer)


def is_described(parameter: ast.arg, lines: list[str]) -> bool:
    "Whether a comment stands beside the parameter, or on a line of its own above it."
    beside = lines[parameter.end_lineno - 1][parameter.end_col_offset :]
    above = lines[parameter.lineno - 2].strip()
    return bool(re.search(r"#\s*\S", beside)) or (above.startswith("#") and not above.startswith("# %%"))


def told(wrong: dict[str, list]) -> str:
    "One line a file with what is wrong in it; '' where nothing is."
    return "\n".join(f"stabilitylab/{name}: {found}" for name, found in wrong.items() if found)


def wide_lines(source: str) -> list[str]:
    "Lines wider than the house allows, of those written by hand (nbdev wraps `__all__` at 120)."
    by_hand = re.sub(
        r"^__all__ = \[.*?\]$", lambda names: "\n" * names[0].count("\n"), source, flags=re.M | re.S
    )
    numbered = enumerate(by_hand.splitlines(), 1)
    return [f"line {n}" for n, line in numbered if not line.startswith("#") and len(line) > WIDEST]


def semicolons(source: str) -> list[str]:
    "Lines that hold a second statement."
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [f"line {t.start[0]}" for t in tokens if t.type == tokenize.OP and t.string == ";"]


def without_annotation(tree: ast.AST) -> list[str]:
    "Parameters of public functions that have no type."
    public = (function for function in functions(tree) if not function.name.startswith("_"))
    pairs = ((function, parameter) for function in public for parameter in parameters(function))
    return [
        f"{function.name}({parameter.arg})" for function, parameter in pairs if parameter.annotation is None
    ]


def without_description(tree: ast.Module, lines: list[str]) -> list[str]:
    "Parameters of public functions without a comment: methods and functions inside others, too."
    public = [f for f in functions(tree) if not f.name.startswith("_")]
    return [f"{f.name}({p.arg})" for f in public for p in parameters(f) if not is_described(p, lines)]


def test_no_line_is_wider():
    wrong = told({name: wide_lines(source) for name, source in SOURCES.items()})
    assert not wrong, f"wider than {WIDEST} characters:\n{wrong}"


def test_one_statement_a_line():
    wrong = told({name: semicolons(source) for name, source in SOURCES.items()})
    assert not wrong, f"two statements on a line:\n{wrong}"


def test_no_function_decides_too_often():
    counts = {name: [(f.name, decisions(f)) for f in functions(tree)] for name, tree in TREES.items()}
    wrong = told({name: [f for f in found if f[1] > MOST_BRANCHES] for name, found in counts.items()})
    assert not wrong, f"functions with more than {MOST_BRANCHES} decisions:\n{wrong}"


def test_nothing_is_nested_in_its_like():
    wrong = told({name: sorted(set(nested(tree))) for name, tree in TREES.items()})
    assert not wrong, f"lines with a ternary in a ternary, or a comprehension in one:\n{wrong}"


def test_public_parameters_are_annotated():
    wrong = told({name: without_annotation(tree) for name, tree in TREES.items()})
    assert not wrong, f"public parameters without a type:\n{wrong}"


def test_public_parameters_are_described():
    wrong = told({name: without_description(TREES[name], SOURCES[name].splitlines()) for name in SOURCES})
    assert not wrong, f"public parameters without a comment beside them:\n{wrong}"


def test_the_rules_find_what_they_look_for():
    "Each rule on a line that breaks it, so that an empty list means something."
    source = "a = 1; b = 2\n" + "c = " + "1" * WIDEST + "\ndef f(x):\n return x\n"
    assert (semicolons(source), wide_lines(source)) == (["line 1"], ["line 2"])
    assert wide_lines("__all__ = ['" + "a" * WIDEST + "']\nx = 1\n") == []
    tree = ast.parse(source)
    assert without_annotation(tree) == without_description(tree, source.splitlines()) == ["f(x)"]
    assert told({"a.py": [], "b.py": ["line 1"]}) == "stabilitylab/b.py: ['line 1']"


def test_private_parameters_are_annotated():
    every = [f for tree in TREES.values() for f in functions(tree) if f.name.startswith("_")]
    typed = [parameter.annotation is not None for function in every for parameter in parameters(function)]
    assert sum(typed) >= PRIVATE_ANNOTATED * len(typed), f"{sum(typed)} of {len(typed)}"


def test_names_are_words():
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    names = [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    short = sum(len(name) == 1 for name in names)
    assert short <= ONE_LETTER * len(names), f"{short} of {len(names)}"


def test_the_count_of_decisions():
    "By hand: one `if` of two parts, one loop, one comprehension with a condition inside a ternary."
    source = "def f(a):\n if a and a > 1:\n  for i in a: pass\n return [i for i in a] if a else 0\n"
    (function,) = functions(ast.parse(source))
    assert decisions(function) == 5
    assert list(nested(ast.parse("x = 1 if a else 2 if b else 3"))) == [1]
