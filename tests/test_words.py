"""The package speaks in the terms of `names/glossary.json`: no banned identifiers, no banned phrases.

Rooms whose names are not replaced yet stand in `NOT_YET` with the number of banned names that are left; it
may fall, not grow. A room that has reached 0 is deleted from the table and stays clean from then on.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from stabilitylab.names.words import BANNED_IDENTIFIERS, BANNED_PHRASES, glossary

PACKAGE = Path(__file__).resolve().parent.parent / "stabilitylab"
SOURCES = {
    path.relative_to(PACKAGE): path.read_text(encoding="utf-8")
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "_modidx.py"
}
SENTENCES = [p for p in sorted(PACKAGE.rglob("*.json")) if p.name != "glossary.json"]

NOT_YET = {  # room -> banned identifiers that are left
    "detect": 2,
}
# room -> banned phrases that are left
PHRASES_NOT_YET = {
    "detect": 8,
    "knowledge": 1,
}
# rooms that have no banned word and get none
CLEAN = {
    "cases",
    "checkpoint",
    "cli",
    "fixes",
    "investigation",
    "models",
    "names",
    "numerics",
    "plot",
    "probe",
    "read",
    "replay",
    "report",
    "run",
    "trial",
    "workbench",
}
# fields and parameters whose names are keys of printed or stored JSON, which stays as it is
KEYS = {
    "numerics/rounding/loss_cast.py place",
    "replay/bisect.py kept",
    "fixes/clipping.py most",
    "fixes/outliers.py least",
    "cases/case.py found",
}


def is_banned(name: str) -> bool:
    "Whether a name, with or without underscores around it, says nothing of its value."
    word = name.strip("_").lower()
    return word in BANNED_IDENTIFIERS or word.startswith("told_") or word.endswith("_told")


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    "Names that a module defines: functions, classes, parameters, locals, attributes; with their lines."
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno


def prose(source: str) -> str:
    "Comments and texts of a module, the docstrings among them; on one line, so that a break hides nothing."
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    return " ".join(" ".join(token.string.split()) for token in tokens if token.type in texts)


def phrases(text: str) -> list[str]:
    "The banned phrases in a text."
    lower = text.lower()
    present = [phrase for phrase in BANNED_PHRASES if phrase.lower() in lower]
    return [phrase for phrase in present if re.search(rf"\b{re.escape(phrase.lower())}\b", lower)]


def room_of(path: Path) -> str:
    "The room of a module."
    return path.parts[0] if len(path.parts) > 1 else ""


def banned_identifiers() -> dict[str, list[str]]:
    "Banned names by room."
    by_room: dict[str, list[str]] = {}
    for path, source in SOURCES.items():
        names = [(path.stem, 1), *identifiers(ast.parse(source))]
        names = [(name, line) for name, line in names if f"{path.as_posix()} {name}" not in KEYS]
        lines = [f"{path}:{line} {name}" for name, line in names if is_banned(name)]
        by_room.setdefault(room_of(path), []).extend(lines)
    return by_room


def banned_phrases() -> dict[str, list[str]]:
    "Banned phrases by room, in modules and in tables of sentences."
    texts = {path: prose(source) for path, source in SOURCES.items()}
    texts |= {path.relative_to(PACKAGE): path.read_text(encoding="utf-8") for path in SENTENCES}
    by_room: dict[str, list[str]] = {}
    for path, text in texts.items():
        by_room.setdefault(room_of(path), []).extend(f"{path}: {phrase}" for phrase in phrases(text))
    return by_room


def too_many(by_room: dict[str, list[str]], allowed: dict[str, int], clean: set[str] = CLEAN) -> str:
    "What is in excess of a table, as text; a room that is new may have taken modules from one in the table."
    counts = Counter({room: len(lines) for room, lines in by_room.items()})
    grown = {room: lines for room, lines in by_room.items() if len(lines) > allowed.get(room, 0)}
    is_moved = counts.total() <= sum(allowed.values()) and not set(grown) & clean
    return "" if is_moved else "\n".join("\n".join(lines) for lines in grown.values())


def test_identifiers_say_what_they_hold():
    wrong = too_many(banned_identifiers(), NOT_YET)
    assert not wrong, f"names that say nothing (what to write stands in names/glossary.json):\n{wrong}"


def test_sentences_use_the_terms():
    wrong = too_many(banned_phrases(), PHRASES_NOT_YET)
    assert not wrong, f"phrases with a term in the glossary:\n{wrong}"


def test_the_rules_see_what_they_look_for():
    source = 'def shown(told):\n    "Taken back."\n    found = self.seen = 1\n    return found'
    names = [name for name, _ in identifiers(ast.parse(source)) if is_banned(name)]
    assert sorted(names) == ["found", "seen", "shown", "told"]
    assert is_banned("_told_of") and is_banned("is_told") and not is_banned("threshold")
    assert phrases(prose(source)) == ["taken back"] and phrases("What was taken, back then") == []
    assert too_many({"probe": ["a"]}, {"read": 5}, {"probe"}) == "a"
    assert too_many({"logs": ["a"]}, {"read": 5}) == "" and too_many({"logs": ["a"]}, {}) == "a"


def test_glossary_covers_what_it_bans():
    table = glossary()
    assert table.index.is_unique and (table.definition.str.split().str.len() > 3).all()
    assert table.definition.str.endswith(".").all() and not table.definition.str.contains(r"\. [A-Z]").any()
    assert all(BANNED_IDENTIFIERS.values()) and all(BANNED_PHRASES.values())
