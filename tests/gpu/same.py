"What `tests/test_device.py` holds on a simulated device, on one that is there: sums, waits, a replay."

import argparse
import sys
import tempfile
import warnings

import numpy as np
import torch

from stabilitylab.models.decoder import LanguageModel
from stabilitylab.models.parts import ModelConfig
from stabilitylab.probe.detail import tensor_detail
from stabilitylab.probe.gpu_sums import compiles_on
from stabilitylab.probe.recorder import Recorder
from stabilitylab.probe.stats import AdamRule, adam_sums, add_sums, empty_row, join_pieces
from stabilitylab.replay.setup_file import setup_of
from stabilitylab.replay.snapshot import load_batch, load_snapshot
from stabilitylab.replay.step import noise_floor, replay

SIZES = {"vocab": 128, "d_model": 64, "n_layer": 2, "n_head": 4, "seq": 64}


def sums(where: str) -> tuple[bool, str]:
    "The five sums and the costly statistics of awkward tensors, beside those of the CPU."
    worst, is_one_launch = 0.0, compiles_on(torch.device(where))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = torch.randn(513, 257, generator=torch.Generator().manual_seed(0)).to(dtype)
        x[3, 5], x[4, 6], x[5] = float("nan"), float("inf"), 0
        rows = []
        for tensor in (x, x.to(where)):
            row = empty_row(tensor.device)
            add_sums(tensor.t(), row)
            row = join_pieces(row) if row.ndim == 2 else row
            rows.append(torch.cat([row, tensor_detail(tensor)]).cpu())
        worst = max(worst, float(((rows[1] - rows[0]).abs() / rows[0].abs().clamp_min(1)).max()))
    how = "one launch" if is_one_launch else "PyTorch's operators"
    return worst < 1e-4, f"sums of four types, {how}: largest relative difference {worst:.1e}"


def adam_step(where: str) -> tuple[bool, str]:
    "The sums of an Adam step with entries that are not finite, beside those of the CPU."
    g, w, m, v = torch.randn(4, 1_100_003, generator=torch.Generator().manual_seed(0)) * 1e-3
    g[3], w[4], m[5], v = float("nan"), float("inf"), float("nan"), v.square()
    rule, rows = AdamRule(3, 0.01, (0.9, 0.99), 1e-5, 0.1), []
    for device in ("cpu", where):
        row = adam_sums(*(t.to(device) for t in (g, w, m, v)), None, rule)
        rows.append((join_pieces(row) if row.ndim == 2 else row).cpu())
    worst = float(((rows[1] - rows[0]).abs() / rows[0].abs().clamp_min(1e-12)).max())
    return worst < 1e-4, f"sums of an Adam step: largest relative difference {worst:.1e}"


def recorded(where: str) -> tuple[bool, str]:
    "Steps under `set_sync_debug_mode('warn')`: what made the host wait inside them."
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig.plain(**SIZES)).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 128, (8, 64), device=where)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with Recorder(model, optimizer, folder) as recorder:
            for step in range(20):
                if where != "cpu":
                    torch.cuda.set_sync_debug_mode("warn" if step else "default")
                loss = model(tokens, tokens)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step(loss.detach())
            if where != "cpu":
                torch.cuda.set_sync_debug_mode("default")
        left = recorder.off
    waits = sorted({str(w.message)[:120] for w in seen if "called a synchronizing" in str(w.message)})
    return (
        not waits and left is None,
        f"recorder: {len(waits)} kinds of waits in 19 steps {waits or ''}{left or ''}",
    )


def replayed(where: str, sample: str) -> tuple[bool, str]:
    "A step of the sample, and three of them beside each other."
    setup = setup_of(sample)
    snapshot, batch = load_snapshot(sample, 300, setup), load_batch(sample, 300, setup)
    host, there = replay(snapshot, batch), replay(snapshot, batch, device=where)
    floor = noise_floor(snapshot, batch, device=where)
    away = abs(host.loss - there.loss)
    return away < 1e-3 and np.isfinite(
        there.grad_norm
    ), f"replay: loss {away:.1e} from the CPU's; repeats {floor}"


def main() -> int:
    "The command."
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sample", default="data_samples/lm_high_lr")
    args = parser.parse_args()
    told = [
        sums(args.device),
        adam_step(args.device),
        recorded(args.device),
        replayed(args.device, args.sample),
    ]
    for is_right, words in told:
        print("ok  " if is_right else "BAD ", words)
    return int(not all(is_right for is_right, _ in told))


if __name__ == "__main__":
    sys.exit(main())
