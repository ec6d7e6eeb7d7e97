"What a shell starts, without a start of Python: the command in this process, a training script in a fork."

import json
import os
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import ModuleType

from stabilitylab.cli.main import main
from stabilitylab.run.forked import ForkedProcess

IMPORTED = (  # while a loop is recorded; an optimizer imports Dynamo, xarray what it finds of dask and scipy
    *("stabilitylab.probe.recorder", "torch._dynamo"),
    *("zarr.api.asynchronous", "dask.array", "scipy.ndimage", "scipy.sparse"),
)


@dataclass(frozen=True)
class Done:
    "What a command left: its exit code and what it wrote."

    returncode: int
    stdout: str
    stderr: str


def command(*words: object) -> Done:
    "`stabilitylab WORDS`; what Ctrl-C, a pipe or an import does can only be seen in a process."
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main([str(word) for word in words])
        except SystemExit as stopped:  # argparse ends the process for a word that it does not know
            code = stopped.code
    return Done(code, out.getvalue(), err.getvalue())


def begin(script: Path, *arguments: object) -> ForkedProcess:
    "`python SCRIPT ARGUMENTS` in its folder, forked from a process that has imported what a loop does."
    folder = Path(tempfile.mkdtemp(dir=script.parent, prefix=".process-"))
    (folder / "words.json").write_text(json.dumps([str(script), *map(str, arguments)]))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    return ForkedProcess("tests.command:as_main", IMPORTED, folder, environment)


def train(script: Path, *arguments: object) -> None:
    "The same to its end, which is a good one."
    process = begin(script, *arguments)
    assert process.wait() == 0, (process.folder / "errors.txt").read_text()


def as_main(folder: str) -> int:
    "Run a script as the main module, which it stays until the process ends."
    sys.argv = json.loads((Path(folder) / "words.json").read_text())
    script = Path(sys.argv[0])
    os.chdir(script.parent)
    sys.path[0] = str(script.parent)
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    main_module.__file__ = str(script)
    exec(compile(script.read_text(encoding="utf-8"), script, "exec"), vars(main_module))
    return 0
