"""What a page says of a name that it exports, read from the source: call, docstring, parameters."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

HEAD = ("", "type", "default", "")


def comments_of(source: str) -> dict[int, str]:
    "Comments by line; one that stands alone counts for the line below it, with those above it."
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    beside = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    alone = {t.start[0] for t in tokens if t.type == tokenize.COMMENT and not t.line[: t.start[1]].strip()}
    for line in sorted(alone):
        below = line + 1
        said = beside.pop(line)
        beside[below] = f"{said} {beside[below]}" if below in beside else said
    return beside


def cell(text: str) -> str:
    "A text as it may stand in a table."
    return re.sub(r"(?<!\\)\|", r"\\|", text.strip())


def row(name: str, kind: ast.expr | None, default: ast.expr | None, said: str) -> tuple[str, ...]:
    "One line of the table of parameters."
    shown = (f"`{cell(plain_default(ast.unparse(part)))}`" if part else "" for part in (kind, default))
    return (name, *shown, cell(quoted_as_code(said)))


def plain_default(text: str) -> str:
    "A default as a reader would type it: that of a dataclass's field without the call around it."
    field = re.match(r"field\(default(_factory)?=(.+?)(?:, \w+=.*)?\)$", text)
    if field is None:
        return text
    return {"dict": "{}", "list": "[]"}.get(field[2], f"{field[2]}()") if field[1] else field[2]


def quoted_as_code(text: str) -> str:
    "Literals in quotes as code, whose quotes stay straight."
    parts = re.split(r"(`[^`]*`)", text)
    literal = re.compile(r"(?<![\w'])'([^'\s]*)'(?![\w'])")
    return "".join(p if p.startswith("`") else literal.sub(r"`'\1'`", p) for p in parts)


def table_of(rows: list[tuple[str, ...]]) -> str:
    "The table of parameters, without the column of defaults where nothing has one."
    kept = [i for i, name in enumerate(HEAD) if name != "default" or any(cells[i] for cells in rows)]
    lines = [HEAD, ("---",) * len(HEAD), *rows] if rows else []
    return "\n".join(f"| {' | '.join(cells[i] for i in kept)} |" for cells in lines)


def parameters(node: ast.FunctionDef) -> Iterator[tuple[str, ast.arg, ast.expr | None]]:
    "(name with its stars, parameter, default) in their order; without `self` and `cls`."
    a = node.args
    plain = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(plain) - len(a.defaults)) + list(a.defaults)
    for parameter, default in zip(plain, defaults, strict=True):
        if parameter.arg not in ("self", "cls"):
            yield parameter.arg, parameter, default
    if a.vararg:
        yield f"*{a.vararg.arg}", a.vararg, None
    for parameter, default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        yield parameter.arg, parameter, default
    if a.kwarg:
        yield f"**{a.kwarg.arg}", a.kwarg, None


def of_function(node: ast.FunctionDef, comments: dict[int, str]) -> tuple[list[str], list[tuple[str, ...]]]:
    "Names of the parameters, and the rows of the table."
    names, rows = [], []
    for name, parameter, default in parameters(node):
        names.append(name)
        last = (default or parameter).end_lineno
        rows.append(row(f"`{name}`", parameter.annotation, default, comments.get(last, "")))
    if node.returns and (said := comments.get(node.returns.end_lineno, "")):
        rows.append(row("**returns**", node.returns, None, said))
    return names, rows


def of_class(node: ast.ClassDef, comments: dict[int, str]) -> tuple[list[str], list[tuple[str, ...]]]:
    "The same of a class: of its `__init__`, else of its fields."
    inits = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    if inits:
        return of_function(inits[0], comments)
    fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and not n.target.id.startswith("_")]
    rows = [row(f"`{n.target.id}`", n.annotation, n.value, comments.get(n.end_lineno, "")) for n in fields]
    return [n.target.id for n in fields], rows


def methods(node: ast.ClassDef) -> list[str]:
    "The public methods of a class, a line each."
    lines = []
    for n in node.body:
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and not n.name.startswith("_"):
            kinds = [ast.unparse(d) for d in n.decorator_list]
            call = "" if "property" in kinds else f"({', '.join(name for name, _, _ in parameters(n))})"
            said = (ast.get_docstring(n) or "").partition("\n")[0]
            if said and not any(
                k.endswith((".setter", ".validate")) or k.startswith("validate") for k in kinds
            ):
                lines.append(f"- `.{n.name}{call}`: {said}")
    return lines


def described(source: str) -> str:
    "The public functions and classes of an exported cell, as Markdown; '' where it has none."
    comments, parts = comments_of(source), []
    for node in ast.parse(source).body:
        is_class = isinstance(node, ast.ClassDef)
        if (not is_class and not isinstance(node, ast.FunctionDef)) or node.name.startswith("_"):
            continue
        names, rows = of_class(node, comments) if is_class else of_function(node, comments)
        call = f"{node.name}({', '.join(names)})" if names or not is_class else node.name
        table = table_of(rows)
        listed = "\n".join(methods(node)) if is_class else ""
        said = re.sub(r"\n\s*", "\n", ast.get_docstring(node) or "")
        parts += [f"### {node.name}", f"```python\n{call}\n```", said, table, listed]
    return "\n\n".join(part for part in parts if part)
