"Text logs: real files against numbers read independently, damage of every kind, a slow twin, a growing file."

import contextlib
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabilitylab.names.errors import InputError
from stabilitylab.read.follow import Follower
from stabilitylab.read.logs.consoles import text_records
from stabilitylab.read.recognise import formats
from stabilitylab.read.runs import read_log, read_runs
from stabilitylab.read.scan import Scan
from stabilitylab.run.scalars import series

nan = math.nan
# file, format, series: (n, first step, last step, first, last, min, step of min, max, step of max, distinct);
# None: not given
REAL = [
    (
        "megatron_text/zetsunozomi__Pier-LLM-Pretraining__exp_find_checkpoint_wrong.o54745",
        "megatron",
        "loss",
        (751, 60010, 67510, 3.20416, 3.20305, 3.18241, 66960, 3.21954, 60630, 737),
    ),
    (
        "megatron_text/zetsunozomi__Pier-LLM-Pretraining__exp_find_checkpoint_wrong.o54745",
        "megatron",
        "grad_norm",
        (751, 60010, 67510, 0.208, 0.206, 0.202, 60940, 0.257, 63170, 38),
    ),
    (
        "megatron_text/bigscience-workshop__bigscience__meg_ds_3d_gpt2_perf_n16-ds-off.out",
        "megatron",
        "loss",
        (62, 1, 62, 12.4424, 20.4387, 11.6495, 31, 48.1413, 4, 62),
    ),
    (
        "megatron_text/bigscience-workshop__bigscience__meg_ds_3d_gpt2_perf_n16-ds-off.out",
        "megatron",
        "grad_norm",
        (62, 1, 62, 67.593, 8.017, 6.203, 31, 77.479, 3, 61),
    ),
    (
        "megatron_text/bigscience-workshop__bigscience__meg_ds_3d_gpt2_perf_n16-ds-on.out",
        "megatron",
        "loss",
        (49, 1, 49, 12.4424, 7.74727, 7.73839, 45, 43.057, 4, 49),
    ),
    (
        "megatron_text/bigscience-workshop__bigscience__meg_ds_3d_gpt2_perf_n16-ds-on.out",
        "megatron",
        "loss_scale",
        (49, 1, 49, -1, -1, -1, 1, -1, 1, 1),
    ),
    (
        "megatron_text/bigscience-workshop__bigscience__meg_gpt2_base_n8_dp1_tp4_pp8-1809562.out",
        "megatron",
        "loss",
        (19, 20, 200, 12.1059, 7.53411, 7.53411, 200, 26.4812, 30, 19),
    ),
    (
        "megatron_text/bigscience-workshop__bigscience__meg_gpt2_base_n8_dp1_tp4_pp8-1809562.out",
        "megatron",
        "grad_norm",
        (18, 30, 200, 67.033, 4.197, 2.298, 160, 81.041, 40, 18),
    ),
    (
        "megatron_text/bigscience-workshop__bigscience__meg_gpt2_perf_n16-1999618.out",
        "megatron",
        "loss_scale",
        (4, 1, 4, 2**32, 2**29, 2**29, 4, 2**32, 1, 4),
    ),
    (
        "nanogpt_text/bdytx5__grokking__run-20240607_131219-tiu2ucrv__output.log",
        "nanogpt",
        "loss",
        (4600, 0, 45990, 4.2706, 0.3088, 0.2847, 44550, 4.2706, 0, 3078),
    ),
    (
        "nanogpt_text/bdytx5__grokking__run-20240607_131219-tiu2ucrv__output.log",
        "nanogpt",
        "val_loss",
        (184, 0, 45750, 4.2823, 2.8716, 1.4719, 1750, None, None, None),
    ),
    (
        "nanogpt_text/bdytx5__grokking__run-20240607_151253-ac8o3s1d__output.log",
        "nanogpt",
        "loss",
        (849, 0, 8480, 4.2706, 1.1337, 1.1274, 1940, 4.2706, 0, 778),
    ),
    (
        "nanogpt_text/bdytx5__grokking__run-20240608_112503-5ihm0269__output.log",
        "nanogpt",
        "loss",
        (2924, 0, 29230, 4.2706, 1.1036, 1.036, 13460, 4.2706, 0, 1429),
    ),
    (
        "nanogpt_text/bdytx5__grokking__run-20240607_131201-3t18j1do__output.log",
        "nanogpt",
        "loss",
        (7830, 0, 75250, 4.2706, 2.7785, 2.6448, 480, 4.2706, 0, 231),
    ),
    (
        "llmc_stdout/HectorFCardenas__llm.c__gpt2_train.11685414.log",
        "llmc",
        "loss",
        (19559, 1, 19560, 11.0097, 3.2534, 3.17153, 19221, 11.0097, 1, 19182),
    ),
    (
        "llmc_stdout/HectorFCardenas__llm.c__gpt2_train.11685414.log",
        "llmc",
        "grad_norm",
        (19559, 1, 19560, 15.0789, 0.2241, 0.2129, 19373, 15.2427, 2, 2792),
    ),
    (
        "llmc_stdout/HectorFCardenas__llm.c__gpt2_train.11685414.log",
        "llmc",
        "val_loss",
        (80, None, None, 11.008, 3.265, None, None, None, None, None),
    ),
    (
        "llmc_stdout/HectorFCardenas__llm.c__gpt2_train.11679031.log",
        "llmc",
        "loss",
        (16255, 1, 16255, nan, nan, nan, None, nan, None, None),
    ),
    (
        "llmc_stdout/HectorFCardenas__llm.c__gpt2_train.11679031.log",
        "llmc",
        "grad_norm",
        (16255, 1, 16255, nan, nan, nan, None, nan, None, None),
    ),
    (
        "llmc_stdout/HectorFCardenas__llm.c__gpt2_train.11672114.log",
        "llmc",
        "loss",
        (750, 1, 750, 11.0103, 4.76392, 4.69017, 744, 11.0103, 1, 750),
    ),
    (
        "llmc_mainlog/KellerJordan__modded-nanogpt__2024-10-13_llmc__main.log",
        "llmc_main",
        "loss",
        (19560, 0, 19559, 11.0091, 3.2217, 3.1022, 18017, 11.0091, 0, 7136),
    ),
    (
        "llmc_mainlog/KellerJordan__modded-nanogpt__2024-10-13_llmc__main.log",
        "llmc_main",
        "grad_norm",
        (19560, 0, 19559, 15.37, 0.22, 0.21, 18555, 15.37, 0, 174),
    ),
    (
        "llmc_mainlog/KellerJordan__modded-nanogpt__2024-10-13_llmc__main.log",
        "llmc_main",
        "val_loss",
        (80, 0, 19560, 11.0092, 3.2722, None, None, None, None, None),
    ),
    (
        "modded_nanogpt/KellerJordan__modded-nanogpt__2024-06-06_AdamW__f66d43d7-e449-4029-8adf-e8537bab49ea.log",
        "llmc_main",
        "loss",
        (9536, 0, 9535, 10.9656, 3.34018, 3.1681, 9224, 10.9656, 0, 9464),
    ),
    (
        "modded_nanogpt/KellerJordan__modded-nanogpt__2024-06-06_AdamW__f66d43d7-e449-4029-8adf-e8537bab49ea.log",
        "llmc_main",
        "val_loss",
        (76, 0, 9536, 10.9689, 3.27596, 3.27596, 9536, 10.9689, 0, 76),
    ),
    (
        "parameter_golf/openai__parameter-golf__2026-03-31_LegendreGPT__train.log",
        "modded_nanogpt",
        "loss",
        (1500, 30020, 60000, 2.0055, 2.0225, 1.872, 59940, 2.6255, 38820, 987),
    ),
    (
        "parameter_golf/openai__parameter-golf__2026-03-31_LegendreGPT__train.log",
        "modded_nanogpt",
        "val_loss",
        (31, 30000, 60000, 2.0349, 2.0322, None, None, None, None, None),
    ),
    (
        "deepspeed_chat/microsoft__DeepSpeedExamples__step1_opt-1.3b__globalBatchSize128.log",
        "deepspeed_chat",
        "lr",
        (736, 10, 7360, 9.649992967150629e-06, 8.490116182110961e-09, None, None, None, None, None),
    ),
    (
        "deepspeed_chat/microsoft__DeepSpeedExamples__step1_opt-1.3b__globalBatchSize128.log",
        "deepspeed_chat",
        "skipped",
        (736, 10, 7360, 6, 139, 6, 10, 139, None, None),
    ),
    (
        "deepspeed_chat/microsoft__DeepSpeedExamples__step1_opt-1.3b__globalBatchSize128.log",
        "deepspeed_chat",
        "perplexity",
        (17, None, None, 4998.3, 1.81, None, None, None, None, None),
    ),
    (
        "deepspeed_chat/microsoft__DeepSpeedExamples__step3_rlhf__globalBatchSize64.log",
        "deepspeed_chat",
        "act_loss",
        (477, 0, 476, 0.209961, -0.0387573, -1.07031, 108, 2.2168, 112, 469),
    ),
    (
        "deepspeed_chat/microsoft__DeepSpeedExamples__step3_rlhf__globalBatchSize64.log",
        "deepspeed_chat",
        "cri_loss",
        (477, 0, 476, 0.120422, -0.0131073, -0.344238, 108, 1.36035, 112, 464),
    ),
    (
        "deepspeed_chat/microsoft__DeepSpeedExamples__step2_dpo__globalBatchSize-32.log",
        "deepspeed_chat",
        "skipped",
        (236, 0, 2350, 0, 21, 0, 0, 21, None, None),
    ),
    *[
        (f"torchtitan_losses/pytorch__torchtitan__{f}.txt", "step_value", "loss", v)
        for f, v in {
            "llama3_cuda": (100, 1, 100, 8.0491, 2.74647, 2.71723, 98, 8.0491, 1, 100),
            "llama3_rocm_mi350x": (100, 1, 100, 8.04833, 2.77225, 2.72502, 73, 8.04833, 1, 100),
            "qwen3_moe_cuda": (100, 1, 100, 7.60405, 2.85249, 2.81813, 91, 7.60405, 1, 100),
            "qwen3_moe_rocm_mi350x": (100, 1, 100, 8.03949, 2.79069, 2.74021, 98, 8.03949, 1, 100),
        }.items()
    ],
]


@pytest.mark.slow  # real logs
@pytest.mark.parametrize(
    "file, format, name, want", REAL, ids=[f"{r[0].split('/')[1][:60]}:{r[2]}" for r in REAL]
)
def test_real_log(real_logs, file, format, name, want):
    log = read_log(real_logs / file)
    v = series(log, name)
    x, step = v.values, v.step.values
    assert log.attrs["format"] == format, file
    n, first_step, last_step, first, last, low, low_step, high, high_step, distinct = want
    assert len(x) == n, file
    for got, should in ((step[0], first_step), (step[-1], last_step)):
        assert should is None or got == should, file
    if first is nan:
        assert np.isnan(x).all(), file
        return
    assert not np.isnan(x).any() and not np.isinf(x).any(), file
    for got, should in ((x[0], first), (x[-1], last), (x.min(), low), (x.max(), high)):
        assert should is None or got == pytest.approx(
            should, rel=1e-3 if name in ("perplexity", "val_loss") else 1e-5
        ), file
    for got, should in ((step[x.argmin()], low_step), (step[x.argmax()], high_step)):
        assert should is None or got == should, file
    assert distinct is None or len(np.unique(x)) == distinct, file


def test_real_events(real_logs):
    def kinds(file):
        return [k for k in read_log(real_logs / file).event_kind.values]

    pier = read_log(
        real_logs / "megatron_text/zetsunozomi__Pier-LLM-Pretraining__exp_find_checkpoint_wrong.o54745"
    )
    at = {
        k: sorted(set(pier.event_step.values[pier.event_kind.values == k]))
        for k in set(pier.event_kind.values)
    }
    assert 60000 in at["checkpoint_load"] and 65000 in at["checkpoint_save"] and "signal" in at
    assert (
        kinds("deepspeed_chat/microsoft__DeepSpeedExamples__step1_opt-1.3b__globalBatchSize128.log").count(
            "overflow"
        )
        == 139
    )
    assert (
        kinds("deepspeed_chat/microsoft__DeepSpeedExamples__step2_dpo__globalBatchSize-32.log").count(
            "overflow"
        )
        == 20
    )
    assert (
        kinds("deepspeed_chat/microsoft__DeepSpeedExamples__step3_rlhf__globalBatchSize64.log").count(
            "overflow"
        )
        == 14
    )
    assert "signal" in kinds("llmc_stdout/HectorFCardenas__llm.c__gpt2_train.11679031.log")
    repeated = series(
        read_log(real_logs / "nanogpt_text/bdytx5__grokking__run-20240607_131201-3t18j1do__output.log")
    )
    assert (
        len(np.unique(repeated.step)) == 287
        and (repeated.step.values == 46250).sum() == 210
        and repeated.segment.max() == 0
    )


def slow_twin(data, parse):
    "Every line parsed by itself, every number by `float`."
    out, step = {}, 0
    for line in re.split(rb"[\r\n]", re.sub(rb"\x1b\[[0-9;]*[A-Za-z]", b"", data)):
        if len(line) < 2:
            continue
        for h in parse(line):
            if h.step:
                step = int(line[slice(*h.step)])
            for n, a, b in h.fields:
                out.setdefault(n, []).append((step, float(line[a:b].replace(b",", b""))))
    return out


LINES = st.lists(
    st.one_of(
        st.builds(
            lambda i, x, y: f"iter {i}: loss {x!r}, time {y:.2f}ms, mfu 0.31%",
            st.integers(0, 10**6),
            st.floats(allow_nan=True, allow_infinity=True),
            st.floats(0, 1e5),
        ),
        st.builds(
            lambda i, x: f"iter {i}: loss {x:.4f}, time 10.00ms, mfu 0.31%",
            st.integers(0, 10**4),
            st.floats(0, 20),
        ),
        st.text(st.characters(codec="ascii"), max_size=30),
    ),
    min_size=1,
    max_size=200,
)


@settings(max_examples=60, deadline=None)
@given(LINES, st.integers(1, 5))
def test_scanner_equals_its_slow_twin(lines, repeat):
    data = ("\n".join(lines * repeat) + "\n").encode()
    parse = next(f for f in formats() if f.name == "nanogpt").parse
    fast, slow = Scan(parse, max_shapes=7).feed(data).samples(), slow_twin(data, parse)
    assert set(fast) == set(slow)
    for n, s in fast.items():
        steps, values = zip(*slow[n], strict=False)
        np.testing.assert_array_equal(s.value, values)
        np.testing.assert_array_equal(s.step, steps)


ROWS = [(name, record) for name, records in text_records().items() for record in records]


@pytest.mark.parametrize(("name", "record"), ROWS, ids=[name for name, _ in ROWS])
def test_a_row_of_the_table_reads_its_example(name, record):
    parse = next(f for f in formats() if f.name == name).parse
    scan = Scan(parse).feed(record.example.encode() + b"\n")
    values = {series: samples.value.tolist() for series, samples in scan.samples().items()}
    expected = {series: [value] for series, value in record.reads.items() if series != "step"}
    assert values.keys() == expected.keys() and scan.last_step == record.reads.get("step")
    for own, value in expected.items():
        np.testing.assert_array_equal(values[own], value)


def test_the_examples_of_a_row_have_its_signature():
    "The lines of a format, three times over, are recognised as this format."
    for name, records in text_records().items():
        text = "".join(record.example + "\n" for record in records).encode() * 3
        confidence = {format.name: format.sniff(text, Path("x.log")) for format in formats() if format.parse}
        assert max(confidence, key=confidence.get) == name


@pytest.mark.parametrize("format", [f for f in formats() if f.parse], ids=lambda f: f.name)
def test_damage_raises_nothing_but_input_error(format, tmp_path):
    rng, text = np.random.default_rng(0), (format.example + "\n").encode() * 30
    for _ in range(40):
        data = bytearray(text)
        for at in rng.integers(0, len(data), 20):
            data[at] = rng.integers(0, 256)
        (path := tmp_path / "x.log").write_bytes(bytes(data[: rng.integers(1, len(data))]))
        with contextlib.suppress(InputError):
            read_log(path, format.name)


def nanogpt_log(path, text):
    path.write_text(text)
    return read_log(path, "nanogpt")


def test_damaged_lines(tmp_path):
    p = tmp_path / "a.log"
    cut = nanogpt_log(
        p,
        "iter 0: loss 4.0000, time 10.00ms, mfu 1%\n"
        "iter 10: loss 3.5000, time 10.00ms, mfu 1%\n"
        "iter 20: loss 3.",
    )
    assert series(cut).values.tolist() == [4, 3.5] and cut.attrs["skipped"] == {"cut last line": 1}
    glued = nanogpt_log(
        p,
        "iter 0: loss 4.0000, time 1.00ms, mfu 1%iter 10: loss nan, time 1.00ms, mfu 1%\n"
        "warning: xiter 20: loss inf, time 1.00ms, mfu 1%\n",
    )
    assert np.array_equal(series(glued).values, [4, nan, math.inf], equal_nan=True)
    torn = nanogpt_log(
        p,
        "iter 0: loss 4.0000, time 1.00ms, mfu 1%\n"
        "loss at loss at2 2  5.25\n"
        "loss: 2.5 garbled\n"
        "iter 10: loss 3.0000, time 1.00ms, mfu 1%\n",
    )
    assert series(torn).size == 2 and torn.attrs["skipped"] == {"unreadable record": 1}
    restarted = nanogpt_log(
        p,
        "".join(
            f"iter {i}: loss {5 - i / 100:.4f}, time 1.00ms, mfu 1%\n"
            for i in [0, 10, 20, 30, 10, 20, 30, 40]
        ),
    )
    assert series(restarted).segment.values.tolist() == [0] * 4 + [1] * 4
    carriage = nanogpt_log(
        p,
        "\x1b[31miter 0: loss 4.0000, time 1.00ms, mfu 1%\x1b[0m\r"
        "iter 10: loss 3.0000, time 1.00ms, mfu 1%\r\n",
    )
    assert series(carriage).values.tolist() == [4, 3]


def test_script_before_the_records(tmp_path):
    script = "import torch\n" + 'print(f"step:{step}/{n} train_loss:{loss:.4f}")\n' * 8000
    (p := tmp_path / "a.log").write_text(
        script
        + "=" * 100
        + "\n"
        + "".join(
            f"step:{i}/100 train_loss:{5 - i / 30:.4f} train_time:10ms step_avg:1.00ms\n" for i in range(100)
        )
    )
    log = read_log(p)
    assert log.attrs["format"] == "modded_nanogpt" and series(log).size == 100


def test_errors_say_what_was_found(tmp_path):
    for name, content, word in (
        ("empty.log", b"", "empty"),
        ("lfs.log", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "LFS"),
        ("words.log", b"hello there", "hello"),
        ("bin.log", bytes(range(256)) * 9, "binary"),
    ):
        (p := tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=word):
            read_runs(p)
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="no log"):
        read_runs(tmp_path / "folder")


WRITER = """
import sys
f = open(sys.argv[1], 'w', buffering=700)
for i in range(300):
    f.write(f'iter {i}: loss {5-i/100:.4f}, time 1.00ms, mfu 1%\\n')
    if i == 250: sys.stdin.readline() # what has left the buffer by then is read first
"""


def test_follow_a_buffered_writer(tmp_path):
    path = tmp_path / "train.log"
    follower, got, bursts = Follower(path), [], 0
    with subprocess.Popen([sys.executable, "-c", WRITER, path], stdin=subprocess.PIPE) as writer:
        end = time.monotonic() + 60
        while len(got) < 300 and time.monotonic() < end:
            new = follower.poll()
            if "loss" in new.samples:
                got += new.samples["loss"].step.tolist()
                bursts += 1
                if bursts == 1:
                    writer.stdin.close()
            time.sleep(0.005)
    assert got == list(range(300)) and bursts > 1
    assert series(follower.run()).size == 300


PEAK = """
import resource, sys
from stabilitylab.read.text import pieces
from stabilitylab.read.recognise import recognise
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
read = recognise(sys.argv[1]).read(sys.argv[1])
print(len(read.samples['lm loss'].step), (peak() - before)/1024)
"""


@pytest.mark.slow  # measures a process
def test_memory_stays_bounded(tmp_path):
    path, line = (
        tmp_path / "big.log",
        "".join(
            f" iteration {i:8d}/  500000 | consumed samples: {i:12d} | learning rate: 1.0E-04 |"
            f" lm loss: {3 + i / 1e6:.6E} | grad norm: 0.{i % 1000:03d} |\n"
            for i in range(2000)
        ).encode(),
    )
    with open(path, "wb") as f:
        for _ in range(500):
            f.write(line)
    n, mib = subprocess.run(
        [sys.executable, "-c", PEAK, path], capture_output=True, text=True, check=True
    ).stdout.split()
    assert int(n) == 1_000_000 and float(mib) < 600, f"{mib} MiB for a {path.stat().st_size / 1e6:.0f} MB log"


def test_the_step_that_a_user_names_counts_the_rows_of_a_known_format(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,tokens,loss\n0,0,3.0\n1,512,2.5\n2,1024,2.25\n")
    log = read_log(tmp_path / "metrics.csv", step="tokens")
    assert series(log).step.values.tolist() == [0, 512, 1024]
