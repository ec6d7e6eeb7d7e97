"The command: exit codes, one line for every error, JSON, page; in a process of its own pipes, Ctrl-C, watch."

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stabilitylab.cli import diagnose, trial
from stabilitylab.detect.findings import Finding
from tests.command import command as run

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-c", "import sys; from stabilitylab.cli.main import main; sys.exit(main())"]
ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "", "MPLBACKEND": "agg"}


def write(path, lines):
    path.write_text("".join(lines))
    return path


@pytest.fixture
def broken(tmp_path):
    return write(
        tmp_path / "train.log",
        (
            f"step {i} loss: {'nan' if i > 180 else 4 - i / 100:.5} lr: 1e-3\n"
            if i <= 180
            else f"step {i} loss: nan lr: 1e-3\n"
            for i in range(200)
        ),
    )


@pytest.fixture
def healthy(tmp_path):
    return write(tmp_path / "healthy.log", (f"step {i} loss: {2 + 2 * 0.98**i:.5}\n" for i in range(200)))


def test_json_has_exactly_the_keys_of_the_contract(broken):
    r = run("diagnose", broken, "--json")
    told = json.loads(r.stdout, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    assert r.returncode == 0 and list(told) == [
        "source",
        "format",
        "n_steps",
        "first_step",
        "last_step",
        "findings",
        "most_likely",
        "reading",
    ]
    assert told["source"] == [str(broken)] and (told["n_steps"], told["first_step"], told["last_step"]) == (
        200,
        0,
        199,
    )
    nan = next(f for f in told["findings"] if f["kind"] == "non_finite")
    assert list(nan) == ["kind", "severity", "onset", "end", "modules", "evidence", "explanation", "remedies"]
    assert (nan["onset"], nan["end"]) == (181, 199) and nan["evidence"]["series"] == "loss"
    assert {"name", "source", "reported"} == set(nan["remedies"][0])


def test_several_paths_and_a_folder_give_one_object_a_run(broken, healthy, tmp_path):
    for args in ((broken, healthy), (tmp_path,)):
        told = json.loads(run("diagnose", *args, "--json").stdout)
        assert list(told) == ["runs", "shared"] and len(told["runs"]) == 2
        assert {Path(r["source"][0]).name for r in told["runs"]} == {"train.log", "healthy.log"}


def test_two_runs_of_one_name_stay_apart(broken, tmp_path):
    (tmp_path / "b").mkdir()
    other = write(tmp_path / "b" / "train.log", (f"step {i} loss: {4 - i / 100:.5}\n" for i in range(50)))
    told = json.loads(run("diagnose", broken, other, "--json").stdout)
    assert sorted(r["n_steps"] for r in told["runs"]) == [50, 200]


def test_fail_on_finds(broken):
    codes = [run("diagnose", broken, "--fail-on", level).returncode for level in ("info", "warning", "error")]
    assert codes == [1, 1, 1]


def test_fail_on_lets_a_healthy_run_pass(healthy):
    r = run("diagnose", healthy, "--fail-on", "warning")
    assert r.returncode == 0 and "nothing" in r.stdout


def test_text_is_for_people(broken):
    r = run("diagnose", broken)
    assert r.returncode == 0 and not r.stderr and "\x1b" not in r.stdout
    assert "non_finite" in r.stdout and "steps 181–199" in r.stdout and "worked:" in r.stdout


def test_page_and_markdown_are_written(broken, tmp_path):
    r = run("diagnose", broken, "--html", tmp_path / "r.html", "--markdown", tmp_path / "r.md")
    assert (
        r.returncode == 0
        and "<svg" in (tmp_path / "r.html").read_text()
        and (tmp_path / "r.md").read_text().startswith("# ")
    )


def bad_inputs(tmp_path):
    (tmp_path / "empty.log").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "code.py").write_text("x = 1\n")
    (tmp_path / "poem.txt").write_text("Shall I compare thee\nto a summer day\n")
    (tmp_path / "noise.bin").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "lfs.csv").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n")
    (tmp_path / "fine.log").write_text("step 1 loss: 2.0\nstep 2 loss: 1.9\n")
    return {
        "nothing there": (["diagnose", tmp_path / "no.log"], "check the spelling"),
        "empty": (["diagnose", tmp_path / "empty.log"], "empty"),
        "folder": (["diagnose", tmp_path / "folder"], ".py"),
        "text": (["diagnose", tmp_path / "poem.txt"], "Shall I"),
        "binary": (["diagnose", tmp_path / "noise.bin"], "binary"),
        "pointer": (["diagnose", tmp_path / "lfs.csv"], "git lfs pull"),
        "format": (["diagnose", tmp_path / "fine.log", "--format", "zzz"], "megatron"),
        "no folder for the page": (
            ["diagnose", tmp_path / "fine.log", "--html", tmp_path / "no" / "r.html"],
            "No such file",
        ),
        "watch a folder": (["watch", tmp_path / "folder"], "one log file"),
        "watch nowhere": (["watch", tmp_path / "no" / "x.log"], "one log file"),
        "preflight of nothing": (["preflight", tmp_path / "no"], "nothing is there"),
        "preflight of no log": (["preflight", tmp_path / "noise.bin"], "binary"),
        "no pause": (["watch", tmp_path / "fine.log", "--every", "0"], "above 0"),
    }


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, subtests):
    for case, (args, said) in bad_inputs(tmp_path).items():
        with subtests.test(case):
            r = run(*args)
            assert r.returncode == 2 and r.stdout == "" and said in r.stderr
            assert r.stderr.startswith("stabilitylab: ") and r.stderr.count("\n") == 1
            assert "Traceback" not in r.stderr


def test_the_command_in_a_process_of_its_own(broken):
    "Once as a shell starts it: the same words and exit codes as in this process."
    for words in (["diagnose", broken, "--fail-on", "error"], ["diagnose", broken.parent / "no.log"]):
        told = subprocess.run([*COMMAND, *map(str, words)], capture_output=True, text=True, env=ENV)
        here = run(*words)
        assert (told.returncode, told.stdout, told.stderr) == (here.returncode, here.stdout, here.stderr)


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() == 0, reason="needs a user without rights to everything"
)
def test_a_file_that_may_not_be_read(broken):
    broken.chmod(0)
    assert run("diagnose", broken).returncode == 2


def test_a_pipe_that_closes_early_is_no_error(broken):
    p = subprocess.Popen([*COMMAND, "formats"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV)
    p.stdout.close()
    assert p.wait(30) in (0, 141) and b"Traceback" not in p.stderr.read()


def test_formats_names_what_format_takes(broken):
    names = [line.split()[0] for line in run("formats").stdout.splitlines()]
    assert {"megatron", "nanogpt", "generic"} <= set(names) and names == sorted(names)
    assert run("diagnose", broken, "--format", "generic").returncode == 0


def test_help_loads_nothing_heavy():
    heavy = {"torch", "matplotlib", "ipywidgets", "xarray", "pandas", "jinja2"}
    code = f"""
import sys
from stabilitylab.cli.main import main
try: main(["--help"])
except SystemExit: pass
print("loaded:", *sorted({heavy} & set(sys.modules)))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV, check=True)
    assert told.stdout.splitlines()[-1] == "loaded:"


@pytest.mark.parametrize("path", ["log", "record"])
def test_diagnose_leaves_dask_out_and_says_the_same(broken, path):
    path = broken if path == "log" else SAMPLE
    code = f"""
import sys
from stabilitylab.cli.main import main
if sys.argv[1] == "loaded": import dask.array
try: main(["diagnose", {str(path)!r}, "--json"])
except SystemExit: pass
print("dask" in sys.modules, "scipy" in sys.modules)
import dask.array, xarray
print(xarray.DataArray(dask.array.ones(4, chunks=2)).chunks)
"""
    command = [sys.executable, "-c", code]
    bare, loaded = (
        subprocess.run([*command, how], capture_output=True, text=True, env=ENV, check=True).stdout
        for how in ("bare", "loaded")
    )
    assert bare.splitlines()[-2:] == ["False False", "((2, 2),)"]
    assert loaded.splitlines()[-1] == "((2, 2),)" and bare.splitlines()[:-2] == loaded.splitlines()[:-2]


@pytest.mark.slow
def test_watch_tells_a_finding_once_and_ends_on_ctrl_c(tmp_path):
    log = write(tmp_path / "train.log", (f"step {i} loss: {4 - i / 100:.5}\n" for i in range(60)))
    p = subprocess.Popen(
        [*COMMAND, "watch", str(log), "--every", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENV,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # a job in the background of a shell inherits an ignored Ctrl-C
    said = []
    for burst in range(3):
        with open(log, "a") as f:
            f.writelines(f"step {60 + burst * 5 + i} loss: nan\n" for i in range(5))
        while burst == 0 and "non_finite" not in "".join(said):
            said.append(p.stdout.readline())
            assert said[-1], p.stderr.read()  # however slow the machine is
        time.sleep(0.8)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=120)
    out = "".join(said) + out
    assert p.returncode == 0 and "Traceback" not in err and "stopped after" in err
    assert out.count("non_finite") == 1, out


def test_ctrl_c_in_diagnose_is_130(monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(diagnose, "run_diagnose", interrupted)
    r = run("diagnose", "x")
    assert r.returncode == 130 and r.stderr == ""


def test_a_fault_of_ours_is_one_line_too(monkeypatch):
    def broken(args):
        raise KeyError("x")

    monkeypatch.setattr(diagnose, "run_diagnose", broken)
    r = run("diagnose", "x")
    assert r.returncode == 2 and r.stderr.count("\n") == 1 and "KeyError" in r.stderr
    monkeypatch.setenv("STABILITYLAB_TRACEBACK", "1")
    with pytest.raises(KeyError):
        run("diagnose", "x")


def test_preflight_is_a_row_a_piece_of_advice_and_attention_only_with_strict_an_exit_code(
    tmp_path, monkeypatch
):
    for name in ("PYTHONUNBUFFERED", "NCCL_P2P_DISABLE", "SLURM_HINT", "NCCL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "requirements.txt").write_text("torch\n")
    write(tmp_path / "train.log", (f"step {i} loss: {2 + 2 * 0.98**i:.5}\n" for i in range(200)))
    calm = run("preflight", tmp_path, "--json", "--strict")
    told = json.loads(calm.stdout)
    assert (calm.returncode, told["attention"], list(told)) == (0, 0, ["path", "attention", "rows"])
    assert {row["verdict"] for row in told["rows"]} <= {"ok", "attention", "cannot tell"}
    assert all(row["advice"] and row["source"] and row["found"] for row in told["rows"])
    assert next(row["verdict"] for row in told["rows"] if "NCCL_DEBUG" in row["looks_at"]) == "cannot tell"
    script = "#SBATCH --hint=multithread --requeue\nexport NCCL_DEBUG=WARN\naccelerate launch train.py\n"
    (tmp_path / "job.slurm").write_text(script)
    plain = run("preflight", tmp_path)
    assert plain.returncode == 0 and "a script sets NCCL_DEBUG=WARN" in plain.stdout
    strict = run("preflight", tmp_path, "--strict")
    assert strict.returncode == 1 and strict.stdout.startswith("! ") and "IDEFICS" in strict.stdout


SAMPLE = ROOT / "data_samples" / "lm_high_lr"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["diagnos", "x"], "did you mean diagnose?"),
        (["diagnose", SAMPLE, "--fail-no", "error"], "did you mean --fail-on?"),
        (["diagnose", SAMPLE, "--fail-on", "eror"], "did you mean error?"),
        (["diagnose"], "PATH"),
        (["trial", SAMPLE, "--seeds", "x"], "'x'"),
        (["trial", SAMPLE, "--plan", "--fix", "z_loss+qk_nrom"], "--fix 'qk_nrom' is not accepted"),
        (["trial", SAMPLE, "--plan", "--fix", "qk_nrom"], "did you mean 'qk_norm'?"),
        (["trial", SAMPLE, "--plan", "--fix", "lower_lr:facto=3"], "did you mean 'factor'?"),
        (["diagnose", SAMPLE, "--loss", "grad_nrm"], "did you mean 'grad_norm'?"),
        (
            ["diagnose", SAMPLE, "--loss", "zzz"],
            "--loss 'zzz' is not accepted; allowed: attn_logit_max, grad",
        ),
        (["diagnose", SAMPLE, "--format", "megatronn"], "did you mean 'megatron'?"),
        (["diagnose", SAMPLE, "--format", "megatron"], "is a record, not a log"),
        (["diagnose", SAMPLE, "--step", "lr"], "leave --step away"),
        (["diagnose", SAMPLE / "train.log", "--loss", "lss"], "did you mean 'loss'?"),
        (["diagnose", SAMPLE / "no.log"], "PATH '"),
        (["replay", SAMPLE, "--step", "9999"], "--step 9999 is not accepted; allowed: one of 300-399"),
        (["check", "EMPTY"], "holds no file"),
        (["diagnose", "EMPTY"], "holds no log"),
    ],
)
def test_a_slip_is_a_sentence_in_words_that_were_typed(words, said, tmp_path):
    "With --json it is an object on standard output, whoever found the fault."
    words = [tmp_path if word == "EMPTY" else word for word in words]
    plain, coded = run(*words), run(*words, "--json")
    assert (plain.returncode, plain.stdout) == (2, "") and said in plain.stderr
    assert plain.stderr.startswith("stabilitylab: ") and plain.stderr.count("\n") == 1
    assert coded.returncode == 2 and coded.stderr == plain.stderr
    answer = json.loads(coded.stdout)
    assert answer.pop("hint") and answer == {"error": plain.stderr.removeprefix("stabilitylab: ").strip()}


def test_the_loss_of_a_record_can_be_named():
    told = json.loads(run("diagnose", SAMPLE, "--loss", "val_loss", "--json").stdout)
    assert told["n_steps"] == 20  # it is logged every 20 steps


def test_a_finding_is_printed_on_one_line(broken):
    finding = Finding(
        "loss_spike", "error", 1500, 1600, explanation="The loss rose.", evidence={"x": [0] * 99}
    )
    assert str(finding) == "error: loss_spike at 1,500–1,600: The loss rose." and "evidence" in repr(finding)
    assert str(Finding("crash")) == "info: crash"


def test_a_trial_says_in_lines_how_far_it_is_where_no_terminal_shows_a_bar(monkeypatch, capsys):
    "A quarter of the steps is there at first, from an earlier call; half of the rest takes a minute."
    clock = iter([0.0, 5.0, 20.0, 25.0, 80.0, 99.0])
    monkeypatch.setattr(trial.time, "monotonic", lambda: next(clock))
    heard = trial._in_lines()
    heard("reading", 0.0)
    heard("training: 3 of 12 done", 0.25)
    heard("training: 4 of 12 done", 0.30)
    heard("training: 7 of 12 done", 0.625)
    heard("diagnosing", 0.0)  # a refusal before anything is trained has one line
    out, err = capsys.readouterr()
    assert not out and err.splitlines() == [
        "training: 3 of 12 done",
        "training: 7 of 12 done, 62%; about 1.0 min left",
    ]
