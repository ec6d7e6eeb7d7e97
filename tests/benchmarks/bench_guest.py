"What breaks a program that is watched: the same actions under our recorder and its peers, if installed."

import argparse
import copy
import io
import pickle
import tempfile
import warnings
from contextlib import contextmanager

import torch
from torch import nn


class Half(torch.optim.AdamW):
    "An optimizer that changes Adam's update."

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.mul_(0.999)


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


@contextmanager
def stabilitylab(model, optimizer):
    from stabilitylab.probe.recorder import Recorder

    with tempfile.TemporaryDirectory() as folder, Recorder(model, optimizer, f"{folder}/r") as recorder:
        yield lambda loss: recorder.step(loss, **{"val/loss": 1.0, "step": 3, "phase": "warmup"})


@contextmanager
def trainscope(model, optimizer):
    from trainscope import TrainScope
    from trainscope.core.config import TrainScopeConfig

    scope = TrainScope(model, optimizer, config=TrainScopeConfig(run_dir=tempfile.mkdtemp())).attach()
    try:
        yield lambda loss: scope.step(float(loss.detach().mean()), batch_index=0)
    finally:
        scope.detach()


@contextmanager
def wandb_watch(model, optimizer):
    import wandb

    run = wandb.init(mode="offline", dir=tempfile.mkdtemp(), settings=wandb.Settings(silent=True))
    wandb.watch(model, log="all", log_freq=1)
    try:
        yield lambda loss: wandb.log({"loss": loss, "val/loss": 1.0, "phase": "warmup"})
    finally:
        run.finish()


@contextmanager
def hugging_face(model, optimizer):
    from transformers.debug_utils import DebugUnderflowOverflow

    DebugUnderflowOverflow(model)
    yield lambda loss: None


def one_step(model, optimizer, close, call=None):
    x = torch.ones(2, 8)
    loss = (call or model)(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    close(loss)


def closure_steps(model, optimizer, close):
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        lbfgs.zero_grad()
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        return loss

    close(lbfgs.step(closure))


def compiled(model, optimizer, close):
    one_step(model, optimizer, close, torch.compile(model, backend="aot_eager", fullgraph=True))


def vector_loss(model, optimizer, close):
    loss = model(torch.ones(2, 8)).square().mean(1)
    loss.sum().backward()
    optimizer.step()
    close(loss)


ACTIONS = {
    "train": one_step,
    "copy.deepcopy(model)": lambda m, o, close: copy.deepcopy(m)(torch.ones(2, 8)).sum().backward(),
    "pickle": lambda m, o, close: pickle.loads(pickle.dumps(m)),
    "torch.save(model)": lambda m, o, close: torch.save(m, io.BytesIO()),
    "AveragedModel": lambda m, o, close: torch.optim.swa_utils.AveragedModel(m).update_parameters(m),
    "torch.func.grad": lambda m, o, close: torch.func.grad(
        lambda p: torch.func.functional_call(m, p, torch.ones(2, 8)).sum()
    )(dict(m.named_parameters())),
    "vmap": lambda m, o, close: torch.func.vmap(m)(torch.ones(3, 2, 8)),
    "jit.trace": lambda m, o, close: torch.jit.trace(m, torch.ones(2, 8), check_trace=False),
    "torch.export": lambda m, o, close: torch.export.export(m, (torch.ones(2, 8),)),
    "compile fullgraph": compiled,
    "LBFGS": closure_steps,
    "vector loss": vector_loss,
}
PEERS = {
    "stabilitylab": stabilitylab,
    "trainscope": trainscope,
    "wandb.watch": wandb_watch,
    "HF DebugUnderflowOverflow": hugging_face,
}


def outcome(peer, action):
    "What an action does under a watcher: 'works', or the error that reached the program."
    torch._dynamo.reset()
    model = model_of()
    optimizer = Half(model.parameters(), lr=1e-3)
    try:
        with peer(model, optimizer) as close:
            action(model, optimizer, close)
    except ImportError:
        return "not installed"
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:60]
    return "works"


def main(argv=()):
    "Print the table."
    options = argparse.ArgumentParser()
    options.add_argument("--peers", nargs="*", default=list(PEERS))
    chosen = options.parse_args(argv).peers
    warnings.simplefilter("ignore")
    for name in chosen:
        results = {action: outcome(PEERS[name], run) for action, run in ACTIONS.items()}
        if set(results.values()) == {"not installed"}:
            print(f"{name}: not installed")
            continue
        works = sum(result == "works" for result in results.values())
        print(f"{name}: {works} of {len(results)} actions work")
        for action, result in results.items():
            print(f"    {action:24s} {result}")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
