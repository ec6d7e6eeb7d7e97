"Two gloo processes against one process on both batches: DDP, FSDP2, a rank that dies."

import numpy as np
import pytest
import torch

from stabilitylab.models.decoder import LanguageModel
from stabilitylab.models.parts import ModelConfig
from stabilitylab.probe.recorder import Recorder
from stabilitylab.run.record import open_run
from tests.command import begin

pytestmark = pytest.mark.slow  # starts processes

FRACTIONS = ("below_eps_frac", "v_below_eps_frac")
LOOP = """
import os, sys, warnings, torch, torch.distributed as dist
warnings.filterwarnings('error', category=UserWarning, module='stabilitylab$')
from stabilitylab.models.parts import ModelConfig
from stabilitylab.models.decoder import LanguageModel
from stabilitylab.probe.recorder import Recorder
path, meet, rank, how, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
die = sys.argv[6] == 'die'
torch.set_num_threads(1)
dist.init_process_group('gloo', init_method=f'file://{meet}', rank=rank, world_size=2)
torch.manual_seed(0)
m = LanguageModel(ModelConfig.plain(d_model=30, n_head=2, n_layer=2, seq=16))
if how == 'ddp': m = torch.nn.parallel.DistributedDataParallel(m)
else:
    from torch.distributed.fsdp import fully_shard
    mesh = torch.distributed.init_device_mesh('cpu', (2,))
    for b in m.blocks: fully_shard(b, mesh=mesh)
    fully_shard(m, mesh=mesh)
opt = torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=.1)
x = torch.randint(0, 128, (4, 16), generator=torch.Generator().manual_seed(7)).chunk(2)[rank]
options = dict(every_n=2, attention_every=2, snapshot_every=2, flush_seconds=.05 if die else 5)
with Recorder(m, opt, path, **options) as rec:
    append, written = rec.recording.store.append, []
    def counted(arrays, events):
        append(arrays, events)
        written.extend(arrays.get('scalars/step', ()))
    rec.recording.store.append = counted
    for i in range(steps):
        rec.batch(x); l = m(x, x); l.backward(); opt.step(); opt.zero_grad(); rec.step(l)
        if die and i == steps - 1:
            import time
            while len(written) < steps: time.sleep(.02) # what is killed then has nothing unwritten
            if rank == 1: os.kill(os.getpid(), 9)
            os._exit(0)
dist.destroy_process_group()
"""


def two(tmp_path, how, steps=4, die="", meet="meet"):
    (tmp_path / "loop.py").write_text(LOOP)
    ranks = [
        begin(tmp_path / "loop.py", tmp_path / "r", tmp_path / meet, rank, how, steps, die) for rank in (0, 1)
    ]
    return [rank.wait() for rank in ranks]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    "The same run in one process."
    path = tmp_path_factory.mktemp("one") / "r"
    torch.manual_seed(0)
    m = LanguageModel(ModelConfig.plain(d_model=30, n_head=2, n_layer=2, seq=16))
    opt = torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1)
    x = torch.randint(0, 128, (4, 16), generator=torch.Generator().manual_seed(7))
    with Recorder(m, opt, path, every_n=2, attention_every=2) as rec:
        for _ in range(4):
            loss = m(x, x)
            loss.backward()
            opt.step()
            opt.zero_grad()
            rec.step(loss)
    return open_run(path).load()


def same(got, want, names, rtol, factor=1.0):
    for v in names:
        np.testing.assert_allclose(
            got[v].values * (factor if v.startswith("grad_") and not v.endswith("count") else 1),
            want[v].values,
            rtol=rtol,
            atol=1e-6,
            err_msg=v,
        )


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_ranks_are_one_run(tmp_path, one, how):
    assert two(tmp_path, how) == [0, 0]
    run = open_run(tmp_path / "r").load()
    assert not (tmp_path / "r" / "live").exists() and set(one.children) <= set(run.children)
    same(run["scalars"], one["scalars"], ("loss", "grad_norm", "weight_norm", "update_norm", "lr"), 1e-3)
    model = LanguageModel(ModelConfig.plain(d_model=30, n_head=2, n_layer=2, seq=16))
    entries_of = {name: value.numel() for name, value in model.named_parameters()}
    for g in ("gradients", "weights", "updates", "optimizer"):
        assert run[g].param.equals(one[g].param)
        same(
            run[g],
            one[g],
            [v for v in one[g].data_vars if v != "mean" and v not in FRACTIONS],
            2e-2 if g in ("updates", "optimizer") else 5e-3,
        )
    sizes = [entries_of[name] for name in one["optimizer"].param.values]
    for v in FRACTIONS:  # counts of entries under a threshold: rounding moves at most one across it
        moved = (run["optimizer"][v] - one["optimizer"][v]).values * sizes
        assert np.abs(moved).max() < 1.5, v
    acts = [v for v in one["activations"].data_vars if "mean" not in v and "nonfinite" not in v]
    each = [
        m for m in one["activations"].module.values if m != "pos_embed"
    ]  # its output has no batch: the gradient is a sum over it
    same(
        run["activations"].sel(module=each), one["activations"].sel(module=each), acts, 5e-3, factor=0.5
    )  # each rank's loss is a mean over half of the tokens
    assert (
        run["rank_activations"].rms.dims == ("step", "module", "rank")
        and run["rank_activations"].rms.notnull().all()
    )
    assert not np.allclose(
        run["rank_activations"].rms.values[..., 0], run["rank_activations"].rms.values[..., 1]
    )
    whole = ["attn_logit_max", "attn_entropy", "sink_score", "rows", "length", "stream_first"]
    same(run["attention"], one["attention"], whole, 5e-3)
    same(run["sampled_weights"], one["sampled_weights"], ("zero_frac", "exponents", "underflow_frac"), 5e-3)
    same(run["sampled_activations"], one["sampled_activations"], ("exponents", "overflow_frac"), 5e-3)
    for _r, folder in enumerate((tmp_path / "r" / "blackbox", tmp_path / "r" / "blackbox" / "rank-1")):
        batch = torch.load(folder / "batch-3-0.pt", weights_only=True)["batch"]
        snap = torch.load(folder / "snapshot-2.pt", weights_only=True)["model"]
        assert batch.shape == (2, 16) and snap["embed.weight"].shape == (
            (128, 30) if how == "ddp" else (64, 30)
        )


def test_continued_and_killed(tmp_path, one):
    assert two(tmp_path, "fsdp", 2, meet="a") == [0, 0] and two(tmp_path, "fsdp", 3, "die", meet="b") == [
        0,
        -9,
    ]
    run = open_run(tmp_path / "r").load()
    assert (
        run["scalars"].segment.values.tolist()
        == [0, 0, 1, 1, 1]
        == run["activations"].segment.values.tolist()
    )
    np.testing.assert_allclose(
        run["scalars"].grad_norm.values[:2], one["scalars"].grad_norm.values[:2], rtol=1e-3
    )
    np.testing.assert_allclose(
        run["gradients"].grad_norm.values[:2], run["gradients"].grad_norm.values[2:4], rtol=1e-5
    )
    assert two(tmp_path, "ddp", 1, meet="c") == [0, 0] and open_run(tmp_path / "r")[
        "scalars"
    ].segment.values.tolist() == [0, 0, 1, 1, 1, 2]
