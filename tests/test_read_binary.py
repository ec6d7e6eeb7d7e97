"TensorBoard event files and W&B offline runs: real files, the tensorboard package as slow twin, and damage."

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabilitylab.read.logs.tensorboard import read_events
from stabilitylab.read.logs.tracker_folders import read_wandb
from stabilitylab.read.runs import read_log, read_runs
from stabilitylab.run.scalars import series

TB = "tensorboard/"
REAL = [
    (
        TB + "lucidrains__x-transformers__copy_base_train__events.out.tfevents.1626523004.ayd98-pro.3815.2",
        "loss",
        (1354, 0, 1353, 3.2842, 0.000985116, 0.000985116, 1353, 4.08799, 2),
    ),
    (
        TB + "lucidrains__x-transformers__copy_base_val__events.out.tfevents.1626523036.ayd98-pro.3815.3",
        "val_accuracy",
        (13, 100, 1300, 0.240741, 0.990741, 0.22619, 200, 0.990741, 500),
    ),
    (
        TB + "wandb__wandb__events.out.tfevents.1585769947.cvp",
        "loss",
        (17, 0, 16, 3.91358, 2.93251e-05, 2.93251e-05, 14, 3.91358, 0),
    ),
    (
        TB + "wandb__wandb__events.out.tfevents.1585769947.cvp",
        "val_loss",
        (17, 0, 16, 2.95635e-05, 2.93251e-05, 2.93251e-05, 13, 2.95635e-05, 0),
    ),
    (
        "wandb_offline/bdytx5__grokking__run-tiu2ucrv.wandb",
        "loss",
        (184, 0, 45750, 4.28738, 0.0956997, 0.0954045, 45500, 4.28738, 0),
    ),
    (
        "wandb_offline/bdytx5__grokking__run-tiu2ucrv.wandb",
        "val_loss",
        (184, 0, 45750, 4.28229, 2.8716, 1.47194, 1750, 4.28229, 0),
    ),
    (
        "wandb_offline/bdytx5__grokking__run-5ihm0269.wandb",
        "loss",
        (117, 0, 29000, 4.28738, 0.951081, 0.948813, 16000, 4.28738, 0),
    ),
    (
        "wandb_offline/bdytx5__grokking__run-ac8o3s1d.wandb",
        "val_loss",
        (34, 0, 8250, 4.28229, 1.46641, 1.46383, 7500, 4.28229, 0),
    ),
]


@pytest.mark.parametrize("file, name, want", REAL, ids=[f"{r[0].split('/')[1][:60]}:{r[1]}" for r in REAL])
def test_real_file(real_logs, file, name, want):
    v = series(read_log(real_logs / file), name)
    x, s = v.values, v.step.values
    got = (len(x), s[0], s[-1], x[0], x[-1], x.min(), s[x.argmin()], x.max(), s[x.argmax()])
    assert got == pytest.approx(want, rel=1e-5), file


def test_edges_of_real_files(real_logs):
    assert (
        read_events(
            real_logs
            / TB
            / "lucidrains__x-transformers__header_only__events.out.tfevents.1626529133.ayd98-pro.3862.0"
        ).samples
        == {}
    )
    assert read_wandb(real_logs / "wandb_offline/wandb__wandb__run-g9dvvkua.wandb").samples == {}
    cut = read_wandb(real_logs / "wandb_offline/bdytx5__grokking__run-5ihm0269.wandb")
    assert (
        cut.skipped == {"bytes at the end that are no record": 7}
        and not cut.attrs["exit_record"]
        and cut.events[0][0] == "signal"
    )
    assert read_wandb(real_logs / "wandb_offline/bdytx5__grokking__run-tiu2ucrv.wandb").attrs["exit_record"]
    runs = read_runs(real_logs / "tensorboard")
    assert len(runs) == 1


def test_real_spike_is_found(real_logs):
    from stabilitylab import diagnose

    found = diagnose(next(iter(read_runs(real_logs / REAL[0][0]).values())))
    assert [f for f in found if f.kind == "loss_spike" and 815 <= f.onset <= 825]
    keras = diagnose(next(iter(read_runs(real_logs / REAL[2][0]).values())))
    assert "leak_suspected" in keras.kinds


def test_equals_the_tensorboard_package(tmp_path):
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path))
    rng = np.random.default_rng(0)
    for i in range(3000):
        for tag in ("loss", "lr", "train/grad_norm"):
            writer.add_scalar(tag, float(rng.normal()) if i % 700 else float("nan"), i * 37, walltime=1e9 + i)
        if i % 500 == 0:
            writer.add_histogram("h", rng.normal(size=10), i)
    writer.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    slow = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    slow.Reload()
    (path,) = tmp_path.glob("events*")
    fast = read_events(path)
    assert set(fast.samples) == set(slow.Tags()["scalars"]) and fast.skipped == {
        "summary that is no scalar": 6
    }
    for tag, s in fast.samples.items():
        want = slow.Scalars(tag)
        assert s.step.tolist() == [e.step for e in want]
        np.testing.assert_array_equal(s.value, [e.value for e in want])
        np.testing.assert_array_equal(s.time, [e.wall_time for e in want])


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 400))
def test_damage_is_skipped_not_raised(tmp_path_factory, noise, at):
    tag = b"loss"
    value = b"\x0a\x04" + tag + b"\x15" + struct.pack("<f", 2.0)
    event = (
        b"\x09"
        + bytes(8)
        + b"\x10\x05"
        + b"\x2a"
        + bytes([len(value) + 2])
        + b"\x0a"
        + bytes([len(value)])
        + value
    )
    whole = b"".join(struct.pack("<QI", len(event), zlib.crc32(event)) + event + bytes(4) for _ in range(8))
    (path := tmp_path_factory.mktemp("tb") / "x").write_bytes(whole[:at] + noise + whole[at:])
    read_events(path)
    (wandb := path.with_name("w")).write_bytes(b":W&B\xe1\xbe\x00" + whole[:at] + noise)
    read_wandb(wandb)
