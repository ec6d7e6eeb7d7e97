"""What recording costs: step time with the recorder over that without, steps in turn, medians; peers beside.

`--clock cpu` counts the processor time of one thread and of the recorder's own, on a machine that others use.
"""

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack, contextmanager

import torch

from tests.benchmarks.bench_guest import PEERS as WATCHERS

WARNED = "normal, warnings"  # with `on_warning="note"`
GOALS = {
    "light": 1.02,
    "normal": 1.05,
    WARNED: 1.05,
    "full": None,
}  # full: what one step with the costly statistics costs


@contextmanager
def torchlens(model, optimizer):
    "Looks at the forward pass of each step once more; ask for it alone, as it replaces functions of torch."
    import torchlens as lens

    last, alone = [], lens.options.CaptureOptions(unwrap_when_done=True)
    handle = model.register_forward_pre_hook(lambda _, inputs: last.append(inputs))
    try:
        yield lambda loss: lens.trace(model, list(last.pop()), capture=alone)
    finally:
        handle.remove()


NAIVE = "naive hook"
BESIDE = [NAIVE, *(name for name in WATCHERS if name != "stabilitylab")]
PEERS = WATCHERS | {"torchlens": torchlens}  # at every step; the library depends on none of them


def naive_hooks(model, out):
    "What people write first: the mean, std and largest value of every output, as Python numbers."

    def hook(m, a, o):
        if torch.is_tensor(o):
            out.append((o.float().mean().item(), o.float().std().item(), o.abs().max().item()))

    return [m.register_forward_hook(hook) for m in model.modules()]


class Arm:
    "One model with its optimizer and, maybe, something that watches it."

    def __init__(self, config, device, watch):
        from stabilitylab.models.decoder import LanguageModel

        torch.manual_seed(0)
        self.model = LanguageModel(config).to(device)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.rec, self.keep, self.peer, self.close = None, [], ExitStack(), None
        if watch in GOALS:
            from stabilitylab.probe.recorder import Recorder

            self.folder = tempfile.TemporaryDirectory()
            options = {"level": "normal", "on_warning": "note"} if watch == WARNED else {"level": watch}
            self.rec = Recorder(self.model, self.opt, f"{self.folder.name}/r", **options).__enter__()
            if self.rec.off:
                self.rec = None
                raise SystemExit("the record could not be opened")
        elif watch == NAIVE:
            naive_hooks(self.model, self.keep)
        elif watch in PEERS:
            self.close = self.peer.enter_context(PEERS[watch](self.model, self.opt))

    def step(self, tokens):
        loss = self.model(tokens, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.opt.zero_grad()
        if self.rec:
            self.rec.step(loss)
        if self.close:
            self.close(loss)
        self.keep.clear()


def bytes_read(model, tokens):
    """Bytes that the default level must read once.

    Outputs and their gradients, linear inputs not met before, gradients twice, weights and two moments once.
    """
    from stabilitylab.probe.guard import Guard
    from stabilitylab.probe.hooks import BackwardEnd, ModuleProbe

    probe = ModuleProbe(BackwardEnd(Guard("bench")))
    probe.hook(model)
    model(tokens, tokens).backward()
    parts, _uses, _order = probe.take()
    probe.remove()
    entries = sum(float(p[:, 0].sum()) for p in parts.values())
    return 4 * entries, 5 * 4 * sum(p.numel() for p in model.parameters())


def main(argv=()):
    "Print the table."
    a = argparse.ArgumentParser()
    a.add_argument("--device", default="cpu")
    a.add_argument("--steps", type=int, default=25)
    a.add_argument("--width", type=int, default=384)
    a.add_argument("--layers", type=int, default=6)
    a.add_argument("--batch", type=int, default=8)
    a.add_argument("--seq", type=int, default=256)
    a.add_argument("--peers", nargs="*", choices=(NAIVE, *PEERS), default=BESIDE)
    a.add_argument("--vocab", type=int, default=128)
    a.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    a.add_argument("--arms", nargs="*", default=["light", "normal", WARNED, "full"])
    o = a.parse_args(argv)
    from stabilitylab.models.parts import ModelConfig

    torch.set_num_threads(2 if o.clock == "wall" else 1)
    clock = time.perf_counter if o.clock == "wall" else time.process_time
    config = ModelConfig.plain(
        vocab=o.vocab, seq=o.seq, d_model=o.width, n_layer=o.layers, n_head=o.width // 64
    )
    tokens = torch.randint(0, o.vocab, (o.batch, o.seq), device=o.device)
    arms = {"without": Arm(config, o.device, None)}
    for w in o.arms + o.peers:
        try:
            arms[w] = Arm(config, o.device, w)
        except ImportError:
            print(f"{w}: not installed")
    times, sync = {k: [] for k in arms}, torch.cuda.synchronize if o.device == "cuda" else lambda: None
    for i in range(o.steps + 3):
        for k, arm in list(arms.items())[:: 1 if i % 2 else -1]:
            sync()
            begin = clock()
            arm.step(tokens)
            sync()
            if i >= 3:
                times[k].append(clock() - begin)
    base = times["without"]
    usual = statistics.median(base)
    n = sum(p.numel() for p in arms["without"].model.parameters())
    print(
        f"{n / 1e6:.1f} M parameters, {o.batch}x{o.seq} tokens, {o.device}, {o.steps} steps in turn; "
        f"without: median {1e3 * usual:.1f} ms, fastest {1e3 * min(base):.1f} ms"
    )
    for k in list(arms)[1:]:
        pair = statistics.median(t / b for t, b in zip(times[k], base, strict=False))
        print(
            f"{k:28s} ratio {statistics.median(times[k]) / usual:.3f}  paired {pair:.3f}"
            f"  of fastest {min(times[k]) / min(base):.3f}"
            + (f"  goal <= {GOALS[k]}" if GOALS.get(k) else "")
        )
    if o.device == "cpu":
        x = torch.empty(60_000_000)
        x.fill_(1.0)
        best = min(_timed(lambda: torch.linalg.vector_norm(x), clock) for _ in range(5))
        rate = x.numel() * 4 / best
        act, par = bytes_read(arms["without"].model, tokens)
        least = (act + par) / rate
        print(
            f"must read {act / 1e6:.0f} MB of activations and {par / 1e6:.0f} MB of parameters a step; "
            f"at {rate / 1e9:.1f} GB/s (vector_norm over 240 MB) that is {1e3 * least:.1f} ms"
            f" = {100 * least / usual:.1f} % of a step"
        )
    for arm in arms.values():
        arm.peer.close()
        if arm.rec:
            arm.rec.__exit__(None, None, None)


def _timed(f, clock):
    "Seconds of one call."
    begin = clock()
    f()
    return clock() - begin


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
