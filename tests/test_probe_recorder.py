"The recorder against slow twins, other people's models, kills and bad disks."

import atexit
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from probe_models import NAMES, tiny
from torch import nn

from stabilitylab.models.decoder import LanguageModel
from stabilitylab.models.parts import ModelConfig
from stabilitylab.probe.recorder import Recorder
from stabilitylab.run.record import open_run

CONFIG = ModelConfig.plain(d_model=32, n_layer=2, seq=16)
NAN = float("nan")
TOKENS = torch.randint(0, 128, (4, 16), generator=torch.Generator().manual_seed(0))


def keep(outs, name, out):
    "Remember an output with its gradient."
    if out.requires_grad:
        out.retain_grad()
    outs.setdefault(name, []).append(out)


def train(path, model=None, opt=None, steps=3, micro=1, clip=None, **kw):
    "A few steps with a twin of every number, by autograd and float64 from outside: `(run, twins)`."
    torch.manual_seed(0)
    model = model or LanguageModel(CONFIG)
    opt = opt(model) if opt else torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    twins = []
    with Recorder(model, opt, path, **kw) as rec:
        for _ in range(steps):
            outs = {}
            hooks = [
                m.register_forward_hook(lambda m, a, o, n=n, outs=outs: keep(outs, n, o))
                for n, m in model.named_modules()
                if n.endswith(("fc1", "embed", "lm_head", "norm1"))
            ]
            for part in TOKENS.chunk(micro):
                loss = model(part, part) / micro
                loss.backward()
            grads = {n: p.grad.double().clone() for n, p in model.named_parameters() if p.grad is not None}
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            opt.step()
            twins.append((outs, grads, before, {n: p.detach().clone() for n, p in model.named_parameters()}))
            opt.zero_grad()
            rec.step(loss)
            for h in hooks:
                h.remove()
    return open_run(path).load(), twins


def check(run, twins, rtol=1e-5, update_rtol=3e-4):
    acts = run["activations"].to_dataset()
    for i, (outs, grads, before, after) in enumerate(twins):
        for name, os_ in outs.items():
            for prefix, ts in (("", os_), ("grad_", [o.grad for o in os_ if o.grad is not None])):
                if not ts:
                    continue
                x = torch.cat([t.detach().double().flatten() for t in ts]).numpy()
                row = acts.sel(module=name).isel(step=i)
                for k, want in (
                    ("absmax", np.abs(x).max()),
                    ("rms", np.sqrt((x**2).mean())),
                    ("mean", x.mean()),
                    ("std", x.std()),
                    ("nonfinite_count", 0),
                ):
                    np.testing.assert_allclose(
                        float(row[prefix + k]),
                        want,
                        rtol=rtol,
                        atol=1e-7 * np.abs(x).max(),
                        err_msg=f"{name} {prefix}{k}",
                    )
        for n, g in grads.items():
            np.testing.assert_allclose(
                float(run["gradients"].grad_norm.sel(param=n)[i]), float(g.norm()), rtol=rtol, err_msg=n
            )
        np.testing.assert_allclose(
            float(run["scalars"].grad_norm[i]),
            float(sum(g.square().sum() for g in grads.values()) ** 0.5),
            rtol=rtol,
        )
        for n in grads:
            u = (after[n].double() - before[n].double()).norm()
            np.testing.assert_allclose(
                float(run["updates"].update_norm.sel(param=n)[i]),
                float(u),
                rtol=update_rtol,
                atol=1e-9,
                err_msg=n,
            )
            np.testing.assert_allclose(
                float(run["weights"].weight_norm.sel(param=n)[i]), float(after[n].double().norm()), rtol=rtol
            )


@pytest.mark.parametrize(
    "opt",
    [
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1),
        lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True),
        lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3),
    ],
    ids=["adamw", "amsgrad", "sgd", "foreach", "rmsprop"],
)
def test_every_number_equals_its_twin(tmp_path, opt):
    check(*train(tmp_path / "r.zarr", opt=opt, clip=0.1))


@pytest.mark.slow
def test_accumulation_and_tied_weights(tmp_path):
    run, twins = train(
        tmp_path / "r.zarr",
        LanguageModel(ModelConfig.plain(d_model=32, n_layer=2, seq=16, tied=True)),
        micro=4,
    )
    check(run, twins)
    assert "lm_head.weight" not in run["gradients"].param.values


@pytest.mark.slow
def test_frozen_parts_and_several_optimizers(tmp_path):
    model = LanguageModel(CONFIG)
    model.embed.requires_grad_(False)
    names = dict(model.named_parameters())
    a, b = (
        torch.optim.SGD([p for n, p in names.items() if n.startswith("blocks.0")], lr=0.1),
        torch.optim.AdamW([p for n, p in names.items() if n.startswith("blocks.1")], lr=1e-3),
    )
    with Recorder(model, [a, b], tmp_path / "r") as rec:
        model(TOKENS, TOKENS).backward()
        a.step()
        b.step()
        rec.step()
    run = open_run(tmp_path / "r")
    norm, update = run["gradients"].grad_norm[0], run["updates"].update_norm[0]
    assert (
        np.isnan(norm.sel(param="embed.weight"))
        and norm.sel(param="lm_head.weight") > 0
        and np.isnan(update.sel(param="lm_head.weight"))
    )
    assert update.sel(param="blocks.0.fc1.weight") > 0 and update.sel(param="blocks.1.fc1.weight") > 0
    assert any("in no optimizer" in t for t in run["events"].event_text.values)


def _whole(parameters):
    "Gradient norm over some parameters, in float64."
    return torch.stack([p.grad.double().norm() for p in parameters]).norm().item()


def _two_players(rec):
    "Two modules in a container that is never called, clipped; the second is trained every other step, twice."
    players = nn.ModuleDict({"value": nn.Linear(6, 1), "policy": nn.Linear(6, 2)})
    value, policy = players["value"], players["policy"]
    first, second = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (value, policy))
    with rec(players, [first, second]) as r:
        for step in range(6):
            x, norms = torch.randn(8, 6), [0.0]
            first.zero_grad()
            loss = value(x).square().mean()
            loss.backward()
            norms.append(_whole(value.parameters()))
            nn.utils.clip_grad_norm_(value.parameters(), 1e-3)
            first.step()
            for _ in range(2 * (step % 2)):
                second.zero_grad()
                (value(x) * policy(x)).mean().backward()  # reaches `value` too, which takes no step of it
                norms[0] = _whole(policy.parameters())
                nn.utils.clip_grad_norm_(policy.parameters(), 1e-3)
                second.step()
            yield np.linalg.norm(norms)
            r.step(loss)


def _penalty(rec):
    "A gradient penalty: its backward pass reaches the parameters past the model's output."
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with rec(model, opt) as r:
        for _ in range(4):
            opt.zero_grad()
            x = torch.randn(8, 6, requires_grad=True)
            loss = model(x).mean()
            loss.backward()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (slope.norm(dim=1) - 1).square().mean().backward()
            yield _whole(model.parameters())
            opt.step()
            r.step(loss)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["light", "normal"])
@pytest.mark.parametrize("program", [_two_players, _penalty])
def test_gradient_norms_of_loops_with_several_backward_passes(tmp_path, program, level):
    torch.manual_seed(0)
    own = list(program(lambda model, opt: Recorder(model, opt, tmp_path, level=level)))
    assert np.allclose(open_run(tmp_path)["scalars"].grad_norm, own, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_sparse_batches_are_kept(tmp_path):
    from stabilitylab.probe.blackbox import batch_id

    dense = torch.randn(5, 5) * (torch.rand(5, 5) < 0.4)
    layouts = [dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()]
    model = nn.Linear(5, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, opt, tmp_path, snapshot_every=1, keep_snapshots=3) as rec:
        for adjacency in layouts:
            batch = rec.batch({"adjacency": adjacency, "x": torch.ones(5, 5)})
            torch.mm(batch["adjacency"], model(batch["x"])).square().mean().backward()
            opt.step()
            rec.step()
    for step, adjacency in enumerate(layouts):
        kept = torch.load(tmp_path / "blackbox" / f"batch-{step}-0.pt", weights_only=True)["batch"][
            "adjacency"
        ]
        assert kept.layout == adjacency.layout and torch.equal(kept.to_dense(), dense)
        assert batch_id(kept) == batch_id(adjacency) != batch_id(adjacency * 2)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_counts_once(tmp_path, reentrant):
    from torch.utils.checkpoint import checkpoint

    class Checked(LanguageModel):
        def forward(self, tokens, targets=None):
            x = self.embed(tokens) + self.pos_embed(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return nn.functional.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), targets.flatten())

    runs = []
    for cls in (LanguageModel, Checked):
        torch.manual_seed(0)
        model = cls(CONFIG)
        opt = torch.optim.AdamW(model.parameters())
        with Recorder(model, opt, tmp_path / cls.__name__) as rec:
            for _ in range(2):
                model(TOKENS, TOKENS).backward()
                opt.step()
                opt.zero_grad()
                rec.step()
        runs.append(open_run(tmp_path / cls.__name__).load())
    for g in ("activations", "gradients", "updates"):
        for v in runs[0][g].data_vars:
            np.testing.assert_allclose(
                runs[1][g][v].values, runs[0][g][v].values, rtol=1e-4, atol=1e-7, err_msg=v
            )


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["1", "0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_costly_statistics_equal_the_twin(tmp_path, monkeypatch, dtype, kernel):
    import test_probe_detail as detail

    from stabilitylab.probe import stats
    from stabilitylab.probe.detail import count_lost_updates

    monkeypatch.setenv("STABILITYLAB_KERNEL", kernel)
    stats.kernel.cache_clear()
    run, twins = train(tmp_path / "r", LanguageModel(CONFIG).to(dtype), micro=2, steps=4, every_n=2)
    stats.kernel.cache_clear()
    acts, grads, weights, updates, states = (
        run[f"sampled_{g}"].to_dataset()
        for g in ("activations", "gradients", "weights", "updates", "optimizer")
    )
    assert acts.step.values.tolist() == [0, 2] == grads.step.values.tolist()

    def same(ds, want, prefix=""):
        for k, v in want.items():
            np.testing.assert_allclose(ds[prefix + k].values, v, rtol=1e-4, atol=1e-6, err_msg=k)

    for row, i in enumerate((0, 2)):
        outs, gs, before, after = twins[i]
        for name, os_ in outs.items():
            same(
                acts.sel(module=name).isel(step=row),
                detail.twin(torch.cat([o.detach().flatten() for o in os_])),
            )
            same(
                acts.sel(module=name).isel(step=row),
                detail.twin(torch.cat([o.grad.flatten() for o in os_])),
                "grad_",
            )
            top = torch.cat([o.detach().float().reshape(-1, o.shape[-1]) for o in os_]).abs().amax(0)
            np.testing.assert_allclose(
                [
                    acts[k].sel(module=name).values[row]
                    for k in ("channel_median", "channel_ratio", "top_channel")
                ],
                [top.median(), top.max() / top.median(), top.argmax()],
                rtol=1e-5,
            )
        for n, g in gs.items():
            same(grads.sel(param=n).isel(step=row), detail.twin(g))
            same(weights.sel(param=n).isel(step=row), detail.twin(after[n]))
            if dtype == torch.float32:
                np.testing.assert_allclose(
                    updates.lost_frac.sel(param=n).values[row],
                    np.divide(*count_lost_updates(before[n], before[n] - after[n]).tolist()[::-1]),
                    atol=5e-3,
                    err_msg=n,
                )
    assert (states.v_exponents.sum("exponent") - 1).max() < 1e-6 and states.m_kurtosis.notnull().all()


@pytest.mark.slow
def test_full_level_and_triggers_sample(tmp_path):
    model = LanguageModel(CONFIG)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = {}
    for name, kw in (
        ("full", dict(level="full")),
        ("never", dict(every_n=0)),
        ("trigger", dict(every_n=0, triggers=(lambda step, s: step == 1,))),
    ):
        with Recorder(model, opt, tmp_path / name, **kw) as rec:
            for _ in range(4):
                model(TOKENS, TOKENS).backward()
                opt.step()
                rec.step()
        run = open_run(tmp_path / name)
        steps[name] = run["sampled_weights"].step.values.tolist() if "sampled_weights" in run.children else []
    assert steps == {"full": [0, 1, 2, 3], "never": [], "trigger": [2]}


def test_a_shared_tensor_fills_every_row_from_the_first_step(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x)
            return self.b(y) + self.b(torch.tanh(y)) + self.c(y)

    model = Twice()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, opt, tmp_path / "r") as rec:
        x = torch.ones(2, 4)
        model(x).sum().backward()
        opt.step()
        rec.step()
    acts = open_run(tmp_path / "r")["activations"]
    assert acts.in_rms.notnull().all() and acts.rms.notnull().all() and acts.grad_rms.notnull().all()


def test_validation_is_not_recorded_and_values_are_untouched(tmp_path):
    torch.manual_seed(0)
    plain = LanguageModel(CONFIG)
    torch.manual_seed(0)
    model = LanguageModel(CONFIG)
    for m, rec in (
        (plain, None),
        (model, Recorder(model, o := torch.optim.AdamW(model.parameters()), tmp_path / "r").__enter__()),
    ):
        opt = torch.optim.AdamW(m.parameters()) if rec is None else o
        for _ in range(3):
            m(TOKENS, TOKENS).backward()
            opt.step()
            opt.zero_grad()
            with torch.no_grad():
                m(TOKENS)
            if rec:
                rec.step()
    rec.__exit__(None, None, None)
    assert all(
        a.equal(b) for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=False)
    )
    assert not model._forward_hooks and not model.embed._forward_hooks


def test_grad_scaler(tmp_path):
    model = LanguageModel(CONFIG)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    norms = []
    with Recorder(model, opt, tmp_path / "r", scaler=scaler) as rec:
        for i in range(3):
            loss = model(TOKENS, TOKENS)
            scaler.scale(loss).backward()
            norms.append(float(sum(p.grad.double().square().sum() for p in model.parameters()) ** 0.5) / 1024)
            if i == 1:
                model.embed.weight.grad[0, 0] = float("inf")
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            rec.step(loss)
    run = open_run(tmp_path / "r")
    np.testing.assert_allclose(run["scalars"].grad_norm.values[:1], norms[:1], rtol=1e-5)
    assert run["scalars"].skipped.values.tolist() == [0, 1, 0] and run[
        "scalars"
    ].loss_scale.values.tolist() == [1024, 1024, 512]


def poison(model, at):
    model.blocks[1].fc1.register_forward_hook(lambda m, a, o: o * float("nan") if model.step == at else None)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["go on", "stop", "skip"])
def test_first_bad_tensor(tmp_path, mode):
    torch.manual_seed(0)
    model = LanguageModel(CONFIG)
    opt = torch.optim.AdamW(model.parameters())
    model.step = 0
    poison(model, 2)
    try:
        with Recorder(model, opt, tmp_path / "r", on_nonfinite=mode) as rec:
            for model.step in range(4):
                model(TOKENS, TOKENS).backward()
                opt.step()
                opt.zero_grad()
                rec.step()
    except FloatingPointError as e:
        assert mode == "stop" and "blocks.1.fc1" in str(e) and "step 2" in str(e)
    else:
        assert mode != "stop"
    run = open_run(tmp_path / "r")
    text = next(t for t in run["events"].event_text.values if "first non-finite" in t)
    assert "forward output of blocks.1.fc1 (torch.float32)" in text and "blocks.1.norm2 out" in text
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters()) == (mode == "skip")
    if mode == "skip":
        assert run["scalars"].skipped.values.tolist() == [0, 0, 1, 0]


def test_a_stop_does_not_wait_for_a_place_that_the_record_never_names(tmp_path):
    "A forward pass without a backward pass, as a validation without `no_grad`, is left out of the record."
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer, errors = torch.optim.SGD(model.parameters(), lr=0.1), []

    def loop():
        with Recorder(model, optimizer, tmp_path / "r", on_nonfinite="stop") as recorder:
            model(torch.full((2, 4), float("nan")))
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            try:
                recorder.step(loss)
            except FloatingPointError as error:
                errors.append(str(error))

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and errors == [
        "step 0: a value is not finite, but the record does not say where"
    ]


def test_steps_that_are_left_out_while_a_part_is_written_are_told_in_the_next():
    from stabilitylab.probe.writer import _Pending

    pending, parts = _Pending(), []

    class SlowStore:
        def append(self, arrays, events):
            parts.append([text for _, _, text, _ in events])
            if len(parts) == 1:
                pending.lost += [7, 8]  # as the training loop does meanwhile

    pending.lost.append(3)
    pending.write(SlowStore())
    pending.write(SlowStore())
    assert parts == [["1 steps from 3 to 3 were not recorded"], ["2 steps from 7 to 8 were not recorded"]]
    assert pending.lost == []


@pytest.mark.slow
def test_a_start_that_is_killed_while_it_moves_the_older_record_loses_nothing(tmp_path, monkeypatch):
    from stabilitylab.run.record import LiveStore

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        recorder.step(1.0)
    parts = {part.name for part in (tmp_path / "r").iterdir() if part.name != "live"} - {".lock"}
    rename, left = Path.rename, [0]

    def killed(self, target):
        left[0] -= 1
        if left[0] < 0:
            raise OSError("killed")
        return rename(self, target)

    for count in range(len(parts)):
        folder = tmp_path / f"killed-{count}"
        shutil.copytree(tmp_path / "r", folder)
        with monkeypatch.context() as patch, pytest.raises(OSError, match="killed"):
            left[0] = count
            patch.setattr(Path, "rename", killed)
            LiveStore(folder, {}, {})
        LiveStore(folder, {}, {}).close(merge=False)
        assert {part.name for part in (folder / "live" / "closed").iterdir()} == parts, count


@pytest.mark.slow  # models of others
@pytest.mark.parametrize("name", NAMES)
def test_other_peoples_models_unmodified(tmp_path, name):
    pytest.importorskip("transformers")
    model, batch = tiny(name)
    model.train()
    opt = torch.optim.AdamW(model.parameters())
    with Recorder(model, opt, tmp_path / "r") as rec:
        for _ in range(2):
            loss = model(**batch).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
            rec.step(loss)
    run = open_run(tmp_path / "r").load()
    acts = run["activations"].to_dataset()
    for role in ("attn.q", "attn.k", "attn.v", "mlp.fc1", "mlp.fc2", "block"):
        rows = acts.isel(module=np.flatnonzero(acts.kind.values == role))
        assert rows.sizes["module"] >= 2 and (rows.rms > 0).all() and (rows.grad_rms.notnull()).all(), role
    assert (run["gradients"].nonfinite_count.fillna(0) == 0).all() and (run["updates"].update_norm > 0).any()


def test_torch_transformer(tmp_path):
    model = nn.Transformer(32, 2, 1, 1, 64, batch_first=True)
    opt = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, 5, 32)
    with Recorder(model, opt, tmp_path / "r") as rec:
        model(x, x).square().mean().backward()
        opt.step()
        rec.step()
    acts = open_run(tmp_path / "r")["activations"]
    assert (
        acts.rms.sel(
            module=[
                "encoder.layers.0",
                "decoder.layers.0",
                "encoder.layers.0.linear1",
                "decoder.layers.0.multihead_attn",
            ]
        )
        > 0
    ).all()


@pytest.mark.slow  # compiles
def test_compiled_after_the_hooks_is_recorded(tmp_path):
    runs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = LanguageModel(CONFIG)
        opt = torch.optim.AdamW(model.parameters())
        with Recorder(model, opt, tmp_path / f"{compiled}") as rec:
            call = torch.compile(model, backend="eager") if compiled else model
            for _ in range(2):
                call(TOKENS, TOKENS).backward()
                opt.step()
                opt.zero_grad()
                rec.step()
        runs.append(open_run(tmp_path / f"{compiled}").load())
    for g in ("activations", "gradients"):
        for v in runs[0][g].data_vars:
            np.testing.assert_allclose(
                runs[1][g][v].values, runs[0][g][v].values, rtol=1e-4, atol=1e-7, err_msg=v
            )


@pytest.mark.slow
def test_bf16_weights_show_the_update_that_was_applied(tmp_path):
    check(
        *train(
            tmp_path / "r",
            LanguageModel(CONFIG).bfloat16(),
            opt=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
        ),
        rtol=1e-2,
        update_rtol=1e-3,
    )


@pytest.mark.slow
def test_bad_paths_hurt_nobody(tmp_path):
    model = LanguageModel(CONFIG)
    opt = torch.optim.AdamW(model.parameters())
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    for path in (tmp_path / "file", tmp_path / "other"):
        with (
            pytest.warns(UserWarning, match="nothing is recorded, training goes on"),
            Recorder(model, opt, path) as rec,
        ):
            model(TOKENS, TOKENS).backward()
            opt.step()
            rec.step(1.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Recorder(model, opt, tmp_path / "r") as rec, Recorder(model, opt, tmp_path / "r") as second:
            second.step(1.0)
            rec.step(1.0)
    assert (
        len(said) == 1
        and "second recorder" in str(said[0].message)
        and open_run(tmp_path / "r")["scalars"].sizes["step"] == 1
    )


@pytest.mark.parametrize("part", ["open_store", "opening_events", "Writer"])
def test_an_opening_that_fails_half_way_is_undone(tmp_path, monkeypatch, part):
    from stabilitylab.probe import recorder

    def broken(*_):
        raise RuntimeError("out of threads")

    model = LanguageModel(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    with monkeypatch.context() as patched:
        patched.setattr(recorder, part, broken)
        with pytest.warns(UserWarning, match="nothing is recorded, training goes on: RuntimeError: out of"):
            failed = Recorder(model, optimizer, tmp_path / "r", snapshot_every=1, on_warning="skip")
            failed.__enter__()
    hooks = [hooks for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]
    assert not any(hooks)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert failed.recording is None and not failed.skip_step
    failed.step(failed.batch(1.0))
    failed.close()
    with Recorder(model, optimizer, tmp_path / "r") as again:
        model(TOKENS, TOKENS).backward()
        optimizer.step()
        again.step(1.0)
    assert again.off is None and open_run(tmp_path / "r")["scalars"].sizes["step"] == 1


def test_full_disk_is_said_once(tmp_path, monkeypatch):
    model = LanguageModel(CONFIG)
    opt = torch.optim.AdamW(model.parameters())
    from stabilitylab.run.record import LiveStore

    monkeypatch.setattr(
        LiveStore, "append", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Recorder(model, opt, tmp_path / "r", flush_seconds=0.01) as rec:
            for _ in range(5):
                model(TOKENS, TOKENS).backward()
                opt.step()
                rec.step(1.0)
                time.sleep(0.03)
    assert len([w for w in said if "No space left" in str(w.message)]) == 1 and rec.guard.step == 5


KILLS = """
import json, os, signal, sys, time, numpy as np, torch
from stabilitylab.models.parts import ModelConfig
from stabilitylab.models.decoder import LanguageModel
from stabilitylab.probe.recorder import Recorder
from stabilitylab.run.record import open_run
torch.set_num_threads(1); root, kills = sys.argv[1], int(sys.argv[2])
w = torch.nn.Parameter(torch.zeros(1)); torch.optim.AdamW([w]).register_step_post_hook(print)
import stabilitylab.probe.writer, stabilitylab.probe.environment # imported once, before the children
if w.grad is None: w.grad = torch.zeros(1); torch.optim.AdamW([w]).step()

def train(path, out):
    model = LanguageModel(ModelConfig.plain(d_model=16, n_layer=1, seq=8))
    opt = torch.optim.AdamW(model.parameters())
    x = torch.randint(0, 128, (2, 8))
    with Recorder(model, opt, path, flush_seconds=.05, snapshot_every=20, every_n=10) as rec:
        for i in range(10**6):
            x = rec.batch(x); loss = model(x, x); loss.backward(); opt.step(); opt.zero_grad(); rec.step(loss)
            os.write(out, i.to_bytes(4, 'little'))

def one(k, rng):
    path, (here, there) = f'{root}/{k % 10}', os.pipe()
    child = os.fork()
    if not child: os.close(here); train(path, there)
    os.close(there); after = rng.integers(0, 40); told = os.read(here, 4)
    while int.from_bytes(told, 'little') < after: told = os.read(here, 4)
    time.sleep(rng.uniform(0, .2)); os.kill(child, signal.SIGKILL); killed = time.time(); os.waitpid(child, 0)
    while more := os.read(here, 4): told = more
    os.close(here); run = open_run(path).load(); s = run['scalars']
    now = s.segment.values == k//10
    rows = s.step.values[now]
    if now.any():
        assert (np.diff(rows) == 1).all() and rows[0] == 0
        assert run['activations'].sizes['step'] == s.sizes['step']
    last = s.time.values[now][-1].astype('M8[ns]').astype(float)/1e9 if now.any() else None
    lost = int.from_bytes(told, 'little') + 1 - len(rows)
    late = killed - (last if last is not None else start)
    index = f'{path}/blackbox/index.json'
    for f in json.loads(open(index).read())['snapshots'] if os.path.exists(index) else []:
        torch.load(f'{path}/blackbox/' + f['file'], weights_only=True)
    return lost, late

rng, lost, late = np.random.default_rng(int(sys.argv[3])), [], []
for k in range(kills):
    start = time.time(); l, t = one(k, rng); lost.append(l); late.append(t)
lost, late = [int(np.median(lost)), max(lost)], [float(np.median(late)), max(late)]
print(json.dumps({'kills': kills, 'lost': lost, 'late': late}))
"""


@pytest.mark.slow  # kills a process again and again
def test_killed_at_random_moments(tmp_path):
    import json

    kills = int(os.environ.get("STABILITYLAB_KILLS", 40))  # 200 for the whole promise
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path), str(kills), "0"],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(__file__)))},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    print(told)
    assert told["kills"] == kills and told["late"][0] < 1 and told["late"][1] < 10, (
        told
    )  # 0.05 s between flushes, and what a loaded machine adds


def test_black_box_stays_within_its_bytes(tmp_path):
    from stabilitylab.probe.blackbox import BlackBox
    from stabilitylab.probe.retention import BoxLimits

    model = nn.Linear(64, 64)
    opt = torch.optim.AdamW(model.parameters())
    used = []
    box = BlackBox(tmp_path, model, [opt], limits=BoxLimits(every=2, keep=50, max_bytes=300_000))
    for step in range(60):
        box.batch(torch.zeros(4, 64), step, 0)
        if step % 7 == 0:
            box.trigger(step)
    box.close()
    files = list(box.folder.glob("*.pt"))
    used = sum(f.stat().st_size for f in files)
    assert used <= 300_000 and {f.name for f in files} == {
        r["file"] for r in box.retained.index["snapshots"] + box.retained.index["batches"]
    }
    assert (
        max(s["step"] for s in box.retained.index["snapshots"]) >= 57
        and (box.folder / "batch-59-0.pt").exists()
        and any(s["pinned"] for s in box.retained.index["snapshots"])
    )


def test_black_box_keeps_the_settings_of_replayable_steps_only(tmp_path):
    from stabilitylab.probe.blackbox import BlackBox
    from stabilitylab.probe.retention import BoxLimits

    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    box = BlackBox(tmp_path, model, [opt], limits=BoxLimits(every=5, keep=2, old=0))
    for step in range(203):
        opt.param_groups[0]["lr"] = 1 / (1 + step)  # a schedule: every step has settings of its own
        box.batch(torch.zeros(1, 2), step, 0)
        box.settings(step)
        if step == 7:
            box.trigger(step)
    box.close()
    rows = {row["step"]: row["optimizers"][0][0]["lr"] for row in box.retained.index["settings"]}
    pinned, *free = box.retained.index["snapshots"]
    assert pinned["pinned"] and pinned["step"] == 5 and pinned["suspect"] == 7
    want = [*range(5, 8), *range(free[0]["step"], 203)]
    assert sorted(rows) == want and all(lr == 1 / (1 + step) for step, lr in rows.items())


@pytest.mark.slow
@pytest.mark.parametrize("has_rule", [False, True])
def test_the_step_of_a_spike_is_kept_with_and_without_a_rule(tmp_path, has_rule):
    import json

    from stabilitylab.detect.loss.spike_rules import OnlineRule

    triggers = (OnlineRule(),) if has_rule else ()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=1e-4)
    with Recorder(model, opt, tmp_path / "r", snapshot_every=10, triggers=triggers) as rec:
        for i in range(150):
            x = rec.batch(torch.randn(64, 8) + (20 if i == 75 else 0))
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            rec.step(loss)
    pinned = [
        s
        for s in json.loads((tmp_path / "r" / "blackbox" / "index.json").read_text())["snapshots"]
        if s["pinned"]
    ]
    assert (
        [s["suspect"] for s in pinned] == [75]
        and pinned[0]["step"] == 70
        and (tmp_path / "r" / "blackbox" / "batch-75-0.pt").exists()
    )
    if has_rule:
        assert 76 in open_run(tmp_path / "r")["sampled_weights"].step.values


@pytest.mark.slow
def test_online_rules_agree_with_the_finished_curve():
    from stabilitylab.detect.loss.spike_rules import LOOK_BACK, RULES, OnlineRule

    rng = np.random.default_rng(1)
    x = 3 - np.linspace(0, 1, 1500) + 0.03 * rng.standard_normal(1500)
    x[[400, 700, 701, 1300]] += 0.8
    x[900:910] *= 2.5
    for name in LOOK_BACK:
        rule = OnlineRule(name, gap=0)
        fired = [i for i, v in enumerate(x) if rule(i, {"loss": v})]
        assert fired == np.flatnonzero(RULES[name].flags(x)).tolist(), name


@pytest.mark.slow
def test_a_new_environment_is_told(tmp_path, monkeypatch):
    from stabilitylab.detect.diagnose import diagnose
    from stabilitylab.probe import settings as e

    model = LanguageModel(CONFIG)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    was = e.environment
    for k, version in enumerate(("1", "1", "2", "3")):
        monkeypatch.setattr(e, "environment", lambda version=version: was() | {"version_x": version})
        rec = Recorder(model, opt, tmp_path / "r", first_step=k).__enter__()
        model(TOKENS, TOKENS).backward()
        opt.step()
        rec.step(1.0)
        if k != 2:
            rec.__exit__(None, None, None)
        else:
            rec.recording.remove()
            rec.recording.writer.close()
            rec.recording.store.lock.close()
            atexit.unregister(rec._finish_at_exit)
    found = diagnose(open_run(tmp_path / "r")).of("environment_change")
    assert [(f.onset, f.evidence["changed"]) for f in found if "changed" in f.evidence] == [
        (2, "version_x 1 to 2"),
        (3, "version_x 2 to 3"),
    ]


@pytest.mark.slow
def test_a_snapshot_and_its_batches_replay_bit_for_bit(tmp_path):
    from stabilitylab.numerics.modes import set_rng_state

    torch.manual_seed(0)
    config = ModelConfig.plain(d_model=32, n_layer=2, seq=16, dropout=0.2)
    model = LanguageModel(config)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with Recorder(model, opt, tmp_path / "r", snapshot_every=3) as rec:
        for _ in range(7):
            x = rec.batch(torch.randint(0, 128, (4, 16)))
            loss = model(x, x)
            loss.backward()
            opt.step()
            opt.zero_grad()
            rec.step(loss)
            losses.append(loss.item())

    def load(name):
        return torch.load(tmp_path / "r" / "blackbox" / name, weights_only=True)

    state = load("snapshot-3.pt")
    again = LanguageModel(config)
    again.load_state_dict(state["model"])
    opt2 = torch.optim.AdamW(again.parameters(), lr=1e-2)
    opt2.load_state_dict(state["optimizer"][0])
    for step in range(3, 7):
        b = load(f"batch-{step}-0.pt")
        set_rng_state(b["rng"])
        loss = again(b["batch"], b["batch"])
        loss.backward()
        opt2.step()
        opt2.zero_grad()
        assert loss.item() == losses[step]
    assert all(
        a.equal(b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=False)
    )


def test_a_model_that_is_one_module(tmp_path):
    model = nn.Linear(8, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, opt, tmp_path / "r") as rec:
        model(torch.ones(2, 8)).sum().backward()
        opt.step()
        rec.step(1.0)
    acts = open_run(tmp_path / "r")["activations"]
    assert acts.module.values.tolist() == ["linear"] and acts.rms.item() > 0 and acts.grad_rms.item() == 1


def test_parameters_that_come_after_the_recorder_count_in_the_norms(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    x, norms, moved = torch.randn(6, 4), [], []
    is_told = pytest.warns(UserWarning, match="2 of 6 parameters came after")
    with is_told, Recorder(model, opt, tmp_path, every_n=1) as rec:
        for step in range(4):
            if step == 2:
                model.append(nn.Linear(4, 3))
                opt.add_param_group({"params": list(model[2].parameters())})
            loss = model(x).square().mean()
            opt.zero_grad()
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3)))
            before = [p.detach().clone() for p in model.parameters()]
            opt.step()
            steps = [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]
            moved.append(float(torch.cat([u.flatten() for u in steps]).norm()))
            rec.step(loss)
    run = open_run(tmp_path).load()
    np.testing.assert_allclose(run["scalars"].grad_norm, norms, rtol=1e-5)
    np.testing.assert_allclose(run["scalars"].update_norm, moved, rtol=1e-4)
    assert run["gradients"].sizes["param"] == 4


def test_old_snapshots_remain_at_ever_longer_distances(tmp_path, monkeypatch):
    "A failure that comes slowly has a state from before, at a distance of the order of its own."
    from stabilitylab.probe.retention import BoxLimits, RetainedFiles

    monkeypatch.setattr(RetainedFiles, "write", lambda self: None)
    retained, every = RetainedFiles(tmp_path, BoxLimits(every=10, keep=2, old=4)), 10
    for step in range(20_000):
        row = {"step": step, "bytes": 1, "batch_id": ""}
        if step % every == 0:
            retained.add("snapshots", row | {"file": f"snapshot-{step}.pt", "pinned": False})
        retained.add("batches", row | {"file": f"batch-{step}-0.pt"})
        if step % 1990 == 0 and step:
            starts = [shot["step"] for shot in retained.index["snapshots"]]
            ages = [step - start + every for start in starts]
            ratios = [older / newer for older, newer in itertools.pairwise(ages)]
            assert starts[0] == 0 and len(starts) == 6 and max(ratios) < 30
    batches = [row["step"] for row in retained.index["batches"]]
    starts = [shot["step"] for shot in retained.index["snapshots"]]
    assert [step for step in batches if step < starts[-2]] == [
        step for start in starts[:-2] for step in range(start, start + every)
    ]


def test_the_index_lists_the_old_snapshots_that_are_there(tmp_path):
    from stabilitylab.run.recording import Recording

    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, opt, tmp_path / "r", snapshot_every=3, keep_snapshots=1, old_snapshots=2) as rec:
        for _ in range(40):
            loss = model(rec.batch(torch.randn(2, 2))).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            rec.step(loss)
    box = Recording(tmp_path / "r").box()
    assert {file.name for file in box.folder.glob("*.pt")} == {
        row["file"] for row in box.snapshots + box.batches
    }
    first, second, newest = box.starts
    assert first == 0 and newest == 39 and box.steps == [0, 1, 2, *range(second, second + 3), 39]
    assert Recording(tmp_path / "r").snapshot_before(second + 1) == second
    with pytest.raises(ValueError, match="old_snapshots"):
        Recorder(model, opt, tmp_path / "none", old_snapshots=-1)


def test_a_run_that_went_back_keeps_its_new_snapshots(tmp_path):
    from stabilitylab.probe.blackbox import BlackBox
    from stabilitylab.probe.retention import BoxLimits

    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    for first, last in ((0, 20), (8, 12)):
        box = BlackBox(tmp_path, model, [opt], limits=BoxLimits(every=2, keep=2, old=0))
        for step in range(first, last):
            box.batch(torch.zeros(1, 2), step, 0)
        box.close()
    assert [shot["step"] for shot in box.retained.index["snapshots"]] == [8, 10]


class Moments(torch.optim.Optimizer):
    "Keeps its state in a tuple and a list, has two epsilons and no betas."

    def __init__(self, params, value=0.0):
        super().__init__(params, {"lr": 0.1, "eps": (1e-30, 1e-3), "betas": None})
        self.value = value

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"moments": (p.grad.clone(), [torch.full_like(p, self.value)]), "step": 1}
            p.sub_(0.1 * p.grad)


def _trained(path, model, opt, steps=3, batch=lambda i: torch.ones(2, 4), **options):
    "The record of a short run."
    torch.manual_seed(0)
    with Recorder(model, opt, path, merge=False, **options) as rec:
        for i in range(steps):
            loss = model(rec.batch(batch(i))).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            rec.step(loss)
    assert rec.off is None
    return open_run(path).load()


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_optimizer_state_in_tuples(tmp_path, value):
    model = nn.Linear(4, 4)
    run = _trained(tmp_path / "r", model, Moments(model.parameters(), value), level="full", snapshot_every=1)
    assert (
        run["optimizer"].nonfinite_count.sel(param="weight").values.tolist() == [0 if value == 0 else 16] * 3
    )
    assert run.attrs["eps"] is None and (run["updates"].update_norm > 0).all()
    saved = torch.load(tmp_path / "r" / "blackbox" / "snapshot-2.pt", weights_only=True)["optimizer"][0]
    assert len(saved["state"][0]["moments"]) == 2 and saved["param_groups"][0]["eps"] == (1e-30, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("made", ["torch", "transformers"])
def test_adafactor(tmp_path, made):
    model = nn.Linear(4, 4)
    if made == "torch":
        opt = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    else:
        opt = pytest.importorskip("transformers").Adafactor(model.parameters(), lr=1e-2, relative_step=False)
    before = model.weight.detach().clone()
    run = _trained(tmp_path / "r", model, opt, steps=1, level="full", snapshot_every=1)
    moved = float((model.weight - before).norm())
    assert abs(float(run["updates"].update_norm.sel(param="weight")[0]) - moved) < 1e-6 * moved
    assert float(run["scalars"].lr[0]) == pytest.approx(1e-2) and run["scalars"].skipped[0] == 0


@pytest.mark.slow
def test_sparse_gradients_are_those_of_the_dense_embedding(tmp_path):
    runs = []
    for is_sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(20, 4, sparse=is_sparse), nn.Linear(4, 4))
        opt = torch.optim.Adagrad(model.parameters(), lr=0.1)
        options = dict(level="full", snapshot_every=1, on_nonfinite="skip")
        runs.append(
            _trained(tmp_path / str(is_sparse), model, opt, batch=lambda i: torch.arange(6) + i, **options)
        )
    for group, name in (("gradients", "grad_norm"), ("updates", "update_norm"), ("weights", "weight_norm")):
        sparse, dense = (run[group][name].sel(param="0.weight").values for run in runs)
        assert np.allclose(sparse, dense, rtol=1e-6) and (sparse > 0).all()
    assert runs[0]["scalars"].skipped.values.tolist() == [0, 0, 0]


class SAM(torch.optim.Optimizer):
    "Climbs, and lets the optimizer inside descend from where it stood; loops call the two halves."

    def __init__(self, params, **settings):
        super().__init__(params, settings)
        self.base = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.clone()
            p.add_(0.05 * p.grad)
        self.zero_grad()

    def descend(self):
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_inside_another_is_seen(tmp_path, momentum):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    opt, moved = SAM(model.parameters(), lr=0.1, momentum=momentum), []
    with Recorder(model, opt, tmp_path / "r", snapshot_every=1, on_nonfinite="skip") as rec:
        for i in range(3):
            x, before = rec.batch(torch.ones(2, 4)), model.weight.detach().clone()
            if i == 2:
                x = x * float("inf")
            for half in (opt.climb, opt.descend):
                loss = model(x).square().mean()
                loss.backward()
                if i < 2 or half == opt.descend:
                    half()
            moved.append(float((model.weight - before).norm()))
            rec.step(loss)
    run = open_run(tmp_path / "r").load()
    update = run["updates"].update_norm.sel(param="weight").values
    assert run["scalars"].skipped.values.tolist() == [0, 0, 1] and np.allclose(
        update[:2], moved[:2], rtol=1e-5
    )
    texts = run["events"].event_text.values.tolist() if "events" in run.children else []
    assert any("SGD inside the SAM is not in its state_dict" in text for text in texts) == (momentum > 0)


def test_a_step_that_cannot_be_withheld_is_named(tmp_path):
    class Descent:
        def __init__(self, params):
            self.params = list(params)

        def step(self):
            for p in self.params:
                p.data.sub_(0.1 * p.grad)

        def zero_grad(self):
            for p in self.params:
                p.grad = None

    model = nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="Descent runs no hooks: its steps are not skipped"):
        run = _trained(tmp_path / "r", model, Descent(model.parameters()), on_nonfinite="skip")
    assert (run["updates"].update_norm > 0).all()


def test_a_model_inside_torch_func_is_named(tmp_path):
    from torch.func import functional_call, grad, vmap

    model = nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(params, x):
        return functional_call(model, params, (x[None],)).square().mean()

    with (
        pytest.warns(UserWarning, match="inside a transform of torch.func"),
        Recorder(model, opt, tmp_path / "r", merge=False) as rec,
    ):
        params = {name: p.detach() for name, p in model.named_parameters()}
        each = vmap(grad(loss), in_dims=(None, 0))(params, torch.ones(3, 4))
        for name, p in model.named_parameters():
            p.grad = each[name].mean(0)
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
        opt.step()
        rec.step()
    run = open_run(tmp_path / "r").load()
    assert float(run["scalars"].grad_norm[0]) == pytest.approx(float(norm))
    assert run["activations"].rms.isnull().all()


@pytest.mark.slow
def test_a_compiled_model_compiles_no_hook(tmp_path):
    "Twelve layers have more hooks than the recompilations that Dynamo allows: each would be one."
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(12)])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, opt, tmp_path / "r", merge=False) as rec:
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            loss = compiled(rec.batch(torch.ones(2, 4))).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            rec.step(loss)
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert not any("recompile" in reason or "__call__" in reason for reason in breaks)
    assert not torch._dynamo.utils.counters["recompile_limit"]
    assert open_run(tmp_path / "r")["activations"].rms.notnull().all()
    torch._dynamo.reset()


def test_norms_of_weights_that_are_no_numbers_are_none(tmp_path):
    "The sums leave NaN out: a model lost at step 3 would show norms of 0."
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "run") as recorder:
        for step in range(6):
            loss = model(torch.ones(2, 4)).square().mean() * (NAN if step == 3 else 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss)
    scalars = open_run(tmp_path / "run")["scalars"]
    for name in ("weight_norm", "update_norm"):
        assert np.isfinite(scalars[name].values).tolist() == [True] * 3 + [False] * 3
