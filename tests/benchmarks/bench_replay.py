"""What replaying a step costs over the same step in a plain loop, medians of steps in turn.

One step with everything around it taken off, and one whole call.
"""

import argparse
import statistics
import time


def main(argv=()):
    "Print the table."
    a = argparse.ArgumentParser()
    a.add_argument("--times", type=int, default=15)
    a.add_argument("--width", type=int, default=256)
    a.add_argument("--layers", type=int, default=6)
    a.add_argument("--batch", type=int, default=8)
    a.add_argument("--seq", type=int, default=256)
    a.add_argument("--device", default="cpu")
    o = a.parse_args(argv)
    import torch

    from stabilitylab.models.decoder import LanguageModel
    from stabilitylab.models.parts import ModelConfig
    from stabilitylab.replay.blame import blame
    from stabilitylab.replay.snapshot import Batch, Setup, Snapshot
    from stabilitylab.replay.step import replay

    torch.set_num_threads(2)
    config = ModelConfig.plain(seq=o.seq, d_model=o.width, n_layer=o.layers, n_head=o.width // 64)
    setup = Setup(
        lambda: LanguageModel(config),
        lambda m, b: m(b["tokens"], b["targets"]),
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4),
    )
    torch.manual_seed(0)
    model = setup.model().to(o.device)
    optimizer = setup.optimizer(model)
    x = torch.randint(0, config.vocab, (o.batch, o.seq + 1))
    part = {"tokens": x[:, :-1], "targets": x[:, 1:]}
    there = {k: v.to(o.device) for k, v in part.items()}
    sync = torch.cuda.synchronize if o.device == "cuda" else lambda: None

    def step():
        loss = setup.loss(model, there)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    snapshot, batch = (
        Snapshot(
            setup,
            {k: v.detach().cpu().clone() for k, v in model.state_dict().items()},
            optimizer.state_dict(),
        ),
        Batch([part]),
    )
    arms = {
        "plain step": step,
        "replay": lambda: replay(snapshot, batch, o.device, record=False),
        "replay with the record": lambda: replay(snapshot, batch, o.device),
        "building the model and loading the state": lambda: snapshot.build(o.device),
    }
    times = {k: [] for k in arms}
    for i in range(o.times + 2):
        for k, f in list(arms.items())[:: 1 if i % 2 else -1]:
            sync()
            begin = time.perf_counter()
            f()
            sync()
            if i >= 2:
                times[k].append(time.perf_counter() - begin)
    base = statistics.median(times["plain step"])
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {o.batch}x{o.seq} tokens, "
        f"{o.device}, {o.times} in turn; plain step {1e3 * base:.0f} ms"
    )
    for k in list(arms)[1:]:
        print(
            f"{k:42s} {1e3 * statistics.median(times[k]):7.0f} ms"
            f"  ratio {statistics.median(times[k]) / base:.2f}" + ("  goal <= 1.5" if k == "replay" else "")
        )
    begin = time.perf_counter()
    blame(snapshot, batch)
    took = time.perf_counter() - begin
    print(f"blame, {o.batch} samples {1e3 * took:7.0f} ms  ratio {took / base:.2f}")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
