"Structured log formats against the manifest of the real logs, and against cut and corrupt files."

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stabilitylab.names.errors import InputError
from stabilitylab.read.recognise import formats

NAMES = {
    *("csv_table", "golden_json", "json_table", "lightning_csv", "llama_factory", "tensorboard_csv"),
    *("tensorboard_json", "torch_curves", "trainer_state", "wandb_csv"),
}
FORMATS = {format.name: format for format in formats() if format.name in NAMES}
HUKUK, P4, GROK, NV = (
    "tensorboard_export/TurkHukuk__hukukbert__run-.-tag-",
    "hf_trainer_state/P4P4N1CK__whisper-large-v2-japanese-5k-steps__",
    "bdytx5__grokking__res_test_",
    "megatron_golden_json/NVIDIA__Megatron-LM__",
)
# file, format, series, count, first step, last step, modal step,
# first, last, min, its step, max, its step, distinct
TRUTH = [
    *(
        (
            f"{HUKUK}train_loss.{e}",
            f"tensorboard_{e}",
            "train_loss",
            308,
            1,
            30700,
            100,
            4.2133,
            1.7495,
            1.7484,
            28800,
            4.2133,
            1,
            286,
        )
        for e in ("csv", "json")
    ),
    *(
        (
            f"{HUKUK}train_grad_norm.{e}",
            f"tensorboard_{e}",
            "train_grad_norm",
            308,
            1,
            30700,
            100,
            4.81498,
            0.560351,
            0.528875,
            27700,
            4.81498,
            1,
            308,
        )
        for e in ("csv", "json")
    ),
    (
        f"{HUKUK}train_learning_rate.csv",
        "tensorboard_csv",
        "train_learning_rate",
        308,
        1,
        30700,
        100,
        0,
        6.22141e-08,
        0,
        1,
        4.995e-05,
        1000,
        308,
    ),
    (
        f"{HUKUK}eval_loss (1).csv",
        "tensorboard_csv",
        "eval_loss",
        62,
        500,
        30736,
        500,
        2.45358,
        1.40986,
        1.35981,
        24000,
        2.45358,
        500,
        62,
    ),
    (
        "wandb_csv/gradio-app__trackio__logs.csv",
        "wandb_csv",
        "lm_loss",
        2270,
        4,
        42509,
        None,
        12.1718,
        2.3295,
        2.27974,
        40966,
        12.1718,
        4,
        2269,
    ),
    (
        "hf_trainer_state/CoralReefFish__whisper-tiny-nbaiLab__trainer_state.json",
        "trainer_state",
        "loss",
        2000,
        50,
        100000,
        50,
        2.936,
        0.8333,
        0.8176,
        99400,
        2.936,
        50,
        1528,
    ),
    (
        "hf_trainer_state/CoralReefFish__whisper-tiny-nbaiLab__trainer_state.json",
        "trainer_state",
        "eval_loss",
        100,
        1000,
        100000,
        1000,
        1.187,
        0.5128,
        0.51,
        98000,
        None,
        None,
        None,
    ),
    (
        f"{P4}final__trainer_state.json",
        "trainer_state",
        "loss",
        200,
        25,
        5000,
        25,
        0.3048,
        0.0002,
        0.0001,
        4325,
        0.3048,
        25,
        74,
    ),
    (
        f"{P4}final__trainer_state.json",
        "trainer_state",
        "eval_loss",
        5,
        1000,
        5000,
        1000,
        0.321,
        0.42,
        0.321,
        1000,
        None,
        None,
        None,
    ),
    (
        f"{P4}step2000__trainer_state.json",
        "trainer_state",
        "loss",
        80,
        25,
        2000,
        25,
        0.3048,
        0.0007,
        0.0006,
        1975,
        0.3048,
        25,
        69,
    ),
    (
        "lightning_csv/Lightning-AI__pytorch-lightning__version_15__metrics.csv",
        "lightning_csv",
        "loss/valid",
        5,
        49,
        249,
        50,
        25.884,
        8.42623,
        8.42623,
        249,
        25.884,
        49,
        5,
    ),
    (
        f"{NV}gpt3_15b_8t_release__golden_values_lts_dgx_a100.json",
        "golden_json",
        "lm loss",
        10173,
        1,
        50860,
        5,
        12.9842,
        2.06903,
        1.98273,
        50270,
        12.9842,
        1,
        8854,
    ),
    (
        f"{NV}mixtral_8x7b_release__golden_values_dev_dgx_h100.json",
        "golden_json",
        "lm loss",
        4538,
        1,
        22685,
        5,
        12.6667,
        1.9726,
        1.94568,
        22605,
        12.6667,
        1,
        4314,
    ),
    (
        f"{NV}bert_release__golden_values_dev_dgx_h100.json",
        "golden_json",
        "lm loss",
        4001,
        1,
        20000,
        5,
        10.5278,
        4.26569,
        3.60302,
        19315,
        10.5742,
        10,
        3963,
    ),
    *(
        (
            f,
            k,
            "lm_losses" if f.endswith("pt") else "lm_loss",
            10000,
            17,
            360145,
            None,
            9.82372,
            1.9939,
            1.95328,
            290209,
            10.3667,
            53380,
            9930,
        )
        for f, k in (
            ("torch_curves/qiuzh20__gated_attention__3T-baseline.pt", "torch_curves"),
            ("derived_csv/qiuzh20__gated_attention__3T-baseline.csv", "csv_table"),
        )
    ),
    *(
        (f, k, s, 23400, 10, 234000, 10, *rest)
        for f, k in (
            (f"torch_curves/{GROK}none.pt", "torch_curves"),
            (f"derived_csv/{GROK}none.csv", "csv_table"),
        )
        for s, *rest in (
            ("train_loss", 4.67838, 0, 0, 73870, 4.67838, 10, 12154),
            ("val_loss", 4.63787, 0.313716, 0.000266612, 71470, 10.9644, 4880, 23400),
        )
    ),
    (
        f"torch_curves/{GROK}ema_a0980_l2_wd50e-03.pt",
        "torch_curves",
        "train_loss",
        30000,
        10,
        300000,
        10,
        4.69256,
        0.0128959,
        0.0029585,
        240330,
        4.69256,
        10,
        30000,
    ),
    (
        f"torch_curves/{GROK}ma_w100_l5_wd10e-02.pt",
        "torch_curves",
        "val_loss",
        7600,
        10,
        76000,
        10,
        4.6327,
        0.0268343,
        0.0113582,
        67340,
        5.27316,
        380,
        7600,
    ),
]


@pytest.mark.parametrize("row", TRUTH, ids=lambda r: f"{r[0]}:{r[2]}")
def test_real_log_equals_the_manifest(real_logs, row):
    (
        file,
        kind,
        name,
        n,
        first_step,
        last_step,
        modal,
        first,
        last,
        low,
        low_step,
        high,
        high_step,
        distinct,
    ) = row
    path = real_logs / file
    head = path.read_bytes()[:65536]
    scores = {k: f.sniff(head, path) for k, f in FORMATS.items()}
    assert max(scores, key=scores.get) == kind, f"{file}: recognised as {scores}"
    s = FORMATS[kind].read(path).samples[name]
    rtol = 5e-4 if high is None else 1e-5  # the manifest rounds evaluation losses to 4 significant digits

    def close(a, b):
        return b is None or a == pytest.approx(b, rel=rtol, abs=1e-12)

    assert (len(s.value), s.step[0], s.step[-1]) == (n, first_step, last_step), file
    assert modal is None or np.bincount(np.diff(s.step)).argmax() == modal, file
    assert close(s.value[0], first) and close(s.value[-1], last) and close(s.value.min(), low), file
    assert s.step[s.value.argmin()] == low_step and np.isfinite(s.value).all(), file
    assert high is None or (close(s.value.max(), high) and s.step[s.value.argmax()] == high_step), file
    assert distinct is None or len(np.unique(s.value)) == distinct, file


def test_golden_gaps_are_counted(real_logs):
    log = FORMATS["golden_json"].read(real_logs / f"{NV}gpt3_15b_8t_release__golden_values_lts_dgx_a100.json")
    assert len(log.samples["iteration-time"].value) == 508 and log.skipped == {
        '"nan" strings that mean missing': 4 * 828 + 11001 - 508
    }


def test_the_earlier_trainer_state_is_a_prefix(real_logs):
    early, final = (
        FORMATS["trainer_state"].read(real_logs / f"{P4}{x}__trainer_state.json").samples["loss"]
        for x in ("step2000", "final")
    )
    assert np.array_equal(early.step, final.step[:80]) and np.array_equal(early.value, final.value[:80])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "file",
    [
        "tensorboard/CoralReefFish__whisper-tiny-nbaiLab__LFS_POINTER__events.out.tfevents.1672375864.ficino.2745717.0",
        "checkpoints/CoralReefFish__whisper-tiny-nbaiLab__LFS_POINTER__pytorch_model.bin",
    ],
)
def test_lfs_pointers_are_named(real_logs, kind, file):
    with pytest.raises(InputError, match="git lfs pull"):
        FORMATS[kind].read(real_logs / file)


SMALL = {r[1]: r[0] for r in reversed(TRUTH) if not r[0].startswith("megatron")} | {
    "golden_json": f"{NV}mixtral_8x7b_release__golden_values_dev_dgx_h100.json"
}
LINES = (
    b'{"current_steps": 1, "total_steps": 3, "loss": 2.5}\n'
    b'{"current_steps": 2, "total_steps": 3, "loss": "NaN"}\n'
)


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1), noise=st.binary(max_size=20))
def test_a_broken_tail_raises_nothing_but_input_error(real_logs, tmp_path, kind, share, noise):
    whole = (real_logs / SMALL[kind]).read_bytes()[:20000] if kind in SMALL else LINES
    path = tmp_path / (SMALL.get(kind, "x").split("/")[-1])
    path.write_bytes(whole[: int(share * len(whole))] + noise)
    try:
        FORMATS[kind].read(path)
    except InputError as e:
        assert len(str(e).splitlines()) == 1
