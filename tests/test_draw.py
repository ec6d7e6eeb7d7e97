"The blind draw holds the figures it reached; each class that it taught, on a written log."

import pytest

from stabilitylab import diagnose, read_runs
from stabilitylab.detect.likely_cause import most_likely
from stabilitylab.detect.non_finite import _UNDEFINED
from tests import draw

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 9, in main\n    run()\n'


@pytest.mark.slow  # real logs
@pytest.mark.skipif(
    not (draw.DRAW / "truth.json").exists(), reason="the draw (shared/real_logs/draw3) is not here"
)
def test_the_draw_holds_what_it_reached():
    scores = draw.scores_of()
    told = draw.table(scores)
    totals = draw.totals(scores)
    for name, least in {"loss": 0.95, "steps": 0.95, "crash": 0.95, "event": 0.8, "quiet": 0.95}.items():
        right, known = totals[name]
        assert right >= least * known, told
    assert totals.get("top wrong", (0, 0))[0] <= 2, told


def run_of(tmp_path, name: str, text: str):
    "The one run of a written log."
    (tmp_path / name).write_text(text)
    (run,) = read_runs(tmp_path / name).values()
    return run


def test_a_column_that_names_the_split_parts_training_from_validation(tmp_path):
    rows = [f"{k},{'val' if k % 5 == 0 else 'train'},{3 - k / 50:.3f}" for k in range(40)]
    scalars = run_of(tmp_path, "a.csv", "step,type,loss\n" + "\n".join(rows) + "\n")["scalars"]
    assert scalars.loss.notnull().sum() == 32 and scalars.val_loss.notnull().sum() == 8


def test_a_bar_drawn_again_counts_each_value_once(tmp_path):
    lines = []
    for update in range(1, 9):
        lines += [
            f"SFT: {k}/90 [00:01<1:00, 2.0s/it, loss {4 / update:.4f}]"
            for k in range(10 * update, 10 * update + 11)
        ]
    scalars = run_of(tmp_path, "a.log", "\n".join(lines) + "\n")["scalars"]
    assert scalars.loss.notnull().sum() == 8


def test_most_lines_of_another_form_are_read_by_the_general_reader(tmp_path):
    lines = [f"INFO: step {k} loss: {3 - k / 200:.4f}, aux {k / 7:.3f}" for k in range(300)]
    lines[150:150] = ["{'eval_loss': 2.5, 'epoch': 1.0}", "{'eval_loss': 2.4, 'epoch': 2.0}"]
    scalars = run_of(tmp_path, "a.log", "\n".join(lines) + "\n")["scalars"]
    assert scalars.loss.notnull().sum() == 300


ENDS = {  # the last line of a traceback -> (failure, a word of its first advice)
    "OSError: [Errno 98] Address already in use: port: 29500": ("port in use", "29500"),
    "ModuleNotFoundError: No module named 'flash_attn'": ("module missing", "flash_attn"),
    "FileNotFoundError: [Errno 2] No such file or directory: 'data/a.bin'": ("missing file", "data/a.bin"),
    "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.": ("loader worker", "shm"),
    "RuntimeError: DataLoader worker (pid 7) is killed by signal: Terminated. ": (
        "loader stopped",
        "scheduler",
    ),
    "RuntimeError: DataLoader worker (pid 7) exited unexpectedly with exit code 1.": (
        "loader worker failed",
        "num_workers=0",
    ),
    "ValueError: No valid checkpoint found in output directory (out)": ("no checkpoint to resume", "resume"),
    "FileExistsError: Checkpoint directory /a/b already exists. Use --overwrite or --resume": (
        "output exists",
        "--overwrite",
    ),
    "OSError: [Errno 122] Disk quota exceeded": ("disk quota", "quota"),
    "KeyError: 'input_ids'": ("key missing", "keys"),
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.": (
        "out of GPU memory",
        "micro-batch",
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_crash_says_what_to_do_about_that_crash(end, tmp_path):
    failure, word = ENDS[end]
    first = diagnose(run_of(tmp_path, "a.log", TRACE + end + "\n"))[0]
    assert first.evidence["failure"] == failure and word in " ".join(first.evidence["next"])
    assert [remedy["name"] for remedy in first.remedies] == first.evidence["next"]
    assert not [remedy for remedy in first.remedies if "8-bit" in remedy["name"]]


def test_pasted_source_text_is_no_crash(tmp_path):
    lines = [f"step {k} loss {3 - k / 100:.3f}" for k in range(60)]
    lines += ["except KeyboardInterrupt:", '    logging.info("Training interrupted by user. Saving.")']
    assert not diagnose(run_of(tmp_path, "a.log", "\n".join(lines) + "\n")).of("crash")


def test_a_restart_that_lost_its_weights_is_not_said_to_have_come_back(tmp_path):
    lines = [f"step {k} loss {1.5 + 0.01 * (k % 7):.3f}" for k in range(400)]
    lines += [f"step {k} loss {13.8 + 0.1 * (k % 5):.3f}" for k in range(390, 800)]
    top = most_likely(diagnose(run_of(tmp_path, "a.log", "\n".join(lines) + "\n")))
    assert top.cause.startswith("The restart") and "did not come back" in top.cause


def test_the_last_refused_argument_is_the_death_whatever_was_wrong_with_it(tmp_path):
    ends = ["--kind: invalid choice: 'p' (choose from 'q')", "--fp16: Truthy value expected: got s"]
    usage = (
        "usage: train.py [-h] [--model_name NAME]\n       [--kind {q,r}] [--fp16 [FP16]] [--bf16 [BF16]]\n"
    )
    text = "\n".join(f"{usage}train.py: error: argument {end}" for end in ends)
    top = most_likely(diagnose(run_of(tmp_path, "a.log", text + "\n")))
    assert top.cause == "The program refused an argument of its command: --fp16."


def test_a_table_of_settings_has_no_jump_of_the_rate(tmp_path):
    rows = "".join(f"100,{rate},{k * 1.5}\n" for k, rate in enumerate([0.01] * 8 + [0.05] * 8))
    run = run_of(tmp_path, "a.csv", "hidden_size,learning_rate,total_time\n" + rows)
    assert not diagnose(run).of("lr_jump")


def test_the_loss_of_a_policy_that_earns_more_is_no_alarm(tmp_path):
    rows = [
        f"{k},{5 + k % 3 + (400 if 150 <= k < 180 else 0)},{min(k, 250)},{0.01 + k % 5 / 1000}"
        for k in range(400)
    ]
    (tmp_path / "a.csv").write_text("step,loss,ep_rew_mean,approx_kl\n" + "\n".join(rows) + "\n")
    (run,) = read_runs(tmp_path / "a.csv").values()
    assert not [f for f in diagnose(run) if f.severity != "info"]


def test_the_last_launch_is_not_explained_by_the_one_before(tmp_path):
    worker = "RuntimeError: DataLoader worker (pid 7) exited unexpectedly with exit code 1."
    launch = "nohup: ignoring input\n"
    text = launch + TRACE + worker + "\n" + launch + TRACE + "ValueError: no format to read the file\n"
    top = most_likely(diagnose(run_of(tmp_path, "a.log", text)))
    assert "ValueError" in top.cause and "worker" not in top.cause


def test_a_loss_that_is_called_by_one_letter_is_the_loss(tmp_path):
    lines = [f"[ep 0 step {20 * k} t={k}s] L={0.4 / (1 + k):.4f} PSNR={10 + k / 7:.2f}" for k in range(30)]
    scalars = run_of(tmp_path, "a.log", "\n".join(lines) + "\n")["scalars"]
    assert float(scalars.loss.max()) == 0.4 and scalars.loss.sizes["step"] == 30


def test_a_statistic_that_is_not_defined_where_nothing_varies_is_a_note(tmp_path):
    rows = [f"{k},{3 - k / 50:.3f},{'nan' if k % 3 else 0.5}" for k in range(60)]
    findings = diagnose(run_of(tmp_path, "a.csv", "step,loss,explained_variance\n" + "\n".join(rows) + "\n"))
    assert [f.severity for f in findings.of("non_finite")] == ["info"]


@pytest.mark.parametrize(
    "name, is_undefined",
    [
        ("train/explained_variance", True),
        ("val_AUC", True),
        ("roc_auc_0", True),
        ("pearsonr", True),
        ("eval_r2", True),
        ("n_correct", False),
        ("corrected_norm", False),
        ("sauce", False),
        ("r2d2", False),
        ("grad_norm", False),
    ],
)
def test_statistics_that_may_be_undefined_are_known_by_whole_words(name, is_undefined):
    assert (_UNDEFINED.search(name) is not None) == is_undefined
