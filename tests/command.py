"The command in this process: what a shell would see of it, without a second start of Python."

from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO

from stabilitylab.cli.main import main


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
