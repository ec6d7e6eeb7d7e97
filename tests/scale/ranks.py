"""`python -m tests.scale.ranks [--world N] [--layout NAME ...] [--out FILE]`: many processes, one record.

A small model trained by many processes that are forked from one warm parent, each with a Recorder.

Layouts: `ddp`, `fsdp` (FSDP2), `tp` (tensor parallel within, data parallel across) and `pp` (a pipeline
within, data parallel across). A fault is put on one rank: its gradient, its input, its time, or `kill -9`.
"""

import argparse
import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from stabilitylab.detect.diagnose import diagnose
from stabilitylab.probe.recorder import Recorder
from stabilitylab.run.record import open_run, save_run

LAYOUTS = ("ddp", "fsdp", "tp", "pp")
FAULTS = ("", "gradient", "input", "time", "kill")
WIDTH, INPUTS = 32, 8


@dataclass(frozen=True)
class Job:
    "What one start of many processes does."

    layout: str  # of `LAYOUTS`
    world: int  # processes
    inner: int  # of one pipeline or one tensor-parallel group; divides `world`
    steps: int
    fault: str = ""  # of `FAULTS`
    bad_rank: int = 0
    fault_step: int = 0  # first step of the fault
    delay: float = 1.0  # seconds that a slow rank takes more


class Block(nn.Module):
    "A residual MLP."

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        "Shape (batch, WIDTH) in and out."
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tower(nn.Module):
    "Blocks between a first and a last layer; a stage of a pipeline holds some of them under their own names."

    def __init__(self, n_blocks: int):
        super().__init__()
        self.first: Any = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(n_blocks)})
        self.last: Any = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        "Shape (batch, INPUTS) to (batch, 1), for the whole model."
        x = x if self.first is None else self.first(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.last is None else self.last(x)


def stage_of(model: Tower, stage: int, n_stages: int) -> Tower:
    "A model without what other stages hold."
    model.first, model.last = (
        (model.first if stage == 0 else None),
        (model.last if stage == n_stages - 1 else None),
    )
    for name in [name for name in model.blocks if int(name) % n_stages != stage]:
        del model.blocks[name]
    return model


class Member:
    "The model of one rank as its layout wants it."

    def __init__(self, job: Job, rank: int):
        self.job, self.rank, self.schedule = job, rank, None
        self.outer, self.place = divmod(rank, job.inner)
        torch.manual_seed(0)
        model = Tower(job.inner if job.layout == "pp" else 2)
        getattr(self, f"_{job.layout}")(model)

    def _ddp(self, model: Tower) -> None:
        self.model: Any = DistributedDataParallel(model)

    def _fsdp(self, model: Tower) -> None:
        mesh = dist.init_device_mesh("cpu", (self.job.world,))
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh)
        self.model = fully_shard(model, mesh=mesh)

    def _tp(self, model: Tower) -> None:
        shape = (self.job.world // self.job.inner, self.job.inner)
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        for block in model.blocks.values():
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        self.model = fully_shard(model, mesh=mesh["dp"])

    def _pp(self, model: Tower) -> None:
        shape = (self.job.world // self.job.inner, self.job.inner)
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
        own = stage_of(model, self.place, self.job.inner)
        self.model = fully_shard(own, mesh=mesh["dp"])
        stage = pipelining.PipelineStage(
            self.model, self.place, self.job.inner, torch.device("cpu"), group=mesh.get_group("pp")
        )
        self.schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        "Inputs and targets; ranks of one inner group share them, but for a wrong one."
        shares = self.job.layout in ("tp", "pp")
        source = self.outer if shares else self.rank
        x = torch.randn(16, INPUTS, generator=torch.Generator().manual_seed(1000 * step + source))
        return x, x.sum(1, keepdim=True)

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        "Forward and backward; the loss, where this rank has one."
        if self.schedule is None:
            loss = nn.functional.mse_loss(self.model(x), y)
            loss.backward()
            return loss
        losses: list[torch.Tensor] = []
        is_last = self.place == self.job.inner - 1
        args = (x,) if self.place == 0 else ()
        self.schedule.step(*args, **({"target": y, "losses": losses} if is_last else {}))
        return torch.stack(losses).mean() if is_last else None


def _spoil_gradient(member: Member, state: dict) -> None:
    "From the fault's step on the gradient of the last block's output is 30 times what it should be."
    model = getattr(member.model, "module", member.model)

    def enlarge(module: nn.Module, args: tuple, out: torch.Tensor) -> torch.Tensor:
        return out * 1.0 if not state["on"] else _Enlarged.apply(out)

    list(model.blocks.values())[-1].register_forward_hook(enlarge)


class _Enlarged(torch.autograd.Function):
    "The same value, with 30 times its gradient."

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        "Unchanged."
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        "30 times."
        return 30 * gradients[0]


def train(job: Job, rank: int, path: Path, options: dict) -> None:
    "The loop of one rank."
    torch.set_num_threads(1)
    meet = path.with_suffix(".meet")
    store = dist.FileStore(str(meet), job.world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=job.world, timeout=timedelta(seconds=300)
    )
    member, is_bad = Member(job, rank), rank == job.bad_rank and bool(job.fault)
    state = {"on": False}
    if is_bad and job.fault == "gradient":
        _spoil_gradient(member, state)
    optimizer = torch.optim.AdamW(member.model.parameters(), lr=1e-2)
    with Recorder(member.model, optimizer, path, **options) as recorder:
        for step in range(job.steps):
            state["on"] = is_bad and step >= job.fault_step
            x, y = member.batch(step)
            if state["on"]:
                x = _apply(job, x)
            loss = member.backward(recorder.batch(x), y)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)
    dist.barrier()
    dist.destroy_process_group()


def _apply(job: Job, x: torch.Tensor) -> torch.Tensor:
    "The input of a bad rank, or nothing of it any more."
    if job.fault == "input":
        return 30 * x
    if job.fault == "time":
        time.sleep(job.delay)
    if job.fault == "kill":
        time.sleep(3 * job.delay)  # what was recorded so far is written
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def launch(job: Job, path: Path, **options: Any) -> list[int]:
    "Exit codes of the ranks, forked from this process; of a killed rank -9, of those that waited for it 1."
    gc.collect()
    gc.freeze()
    pids = []
    for rank in range(job.world):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                train(job, rank, path, options)
                code = 0
            except BaseException:
                if os.environ.get("RANKS_VERBOSE"):
                    traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


@dataclass(frozen=True)
class Row:
    "What one start cost, and what was found in its record."

    layout: str
    ranks: int
    modules: int
    parameters: int
    steps: int
    fault: str
    bad_rank: int | None
    found: str  # kind, rank and step of each finding that names a rank
    exit_codes: str
    train_seconds: float
    open_seconds: float
    diagnose_seconds: float
    live_files: int  # before the ranks were put together
    live_bytes: int
    record_files: int
    record_bytes: int


def _sizes(folder: Path) -> tuple[int, int]:
    "Number and bytes of the files of a folder."
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    return len(sizes), sum(sizes)


def measure(job: Job, path: Path, **options: Any) -> Row:
    "One start: trained without being put together, then opened, diagnosed and closed."
    begin = time.perf_counter()
    codes = launch(job, path, merge=False, **options)
    trained = time.perf_counter()
    live = _sizes(path / "live")
    run = open_run(path).load()
    opened = time.perf_counter()
    findings = diagnose(run)
    ended = time.perf_counter()
    save_run(run, path.with_suffix(".closed"))
    told = [(f.kind, f.evidence.get("rank"), f.onset) for f in findings if f.evidence.get("rank") is not None]
    return Row(
        job.layout,
        job.world,
        run["activations"].sizes["module"],
        run["weights"].sizes["param"],
        job.steps,
        job.fault,
        job.bad_rank if job.fault else None,
        "; ".join(f"{kind} of rank {rank} at step {onset}" for kind, rank, onset in told),
        ", ".join(f"{codes.count(code)} x {code}" for code in sorted(set(codes))),
        round(trained - begin, 2),
        round(opened - trained, 2),
        round(ended - opened, 2),
        *live,
        *_sizes(path.with_suffix(".closed")),
    )


def _jobs(world: int) -> Iterator[Job]:
    "Healthy starts of growing size, then every fault under every layout."
    for ranks in sorted({max(4, world // 8), max(4, world // 4), max(4, world // 2), world}):
        yield Job("ddp", ranks, 2, 20)
    inner = 8 if world >= 32 else 2
    for layout in LAYOUTS:
        faults = FAULTS[1:] if layout == "ddp" else FAULTS
        for number, fault in enumerate(faults):
            first_stage = inner * (
                world // inner - 1 - number % 2
            )  # in a pipeline the stage that has an input
            bad = first_stage if layout == "pp" else world - 3 - number
            yield Job(layout, world, inner, 20, fault, bad, 8)


def main() -> None:
    "The command."
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=64, help="processes; 64 need 8 GB")
    parser.add_argument("--layout", nargs="*", default=LAYOUTS, choices=LAYOUTS)
    parser.add_argument("--out", help="write the rows to this JSON file")
    args = parser.parse_args()
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="stabilitylab-ranks-") as folder:
        for number, job in enumerate(job for job in _jobs(args.world) if job.layout in args.layout):
            row = measure(job, Path(folder) / str(number), every_n=0, flush_seconds=2.0)
            rows.append(asdict(row))
            print(json.dumps(rows[-1]), flush=True)
            if args.out:
                text = ",\n".join(map(json.dumps, rows))
                Path(args.out).write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
