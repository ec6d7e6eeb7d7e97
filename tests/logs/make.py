"""One made run, written in the form of each text, JSON and CSV format: `python -m tests.logs.make`.

The numbers are ours, so that the project can be tested without anybody's logs: a loss that falls, one spike
of the loss with its gradient norm, and losses that are not finite at the end. `tests/test_own_logs.py` holds
the files against `RUN`, which knows nothing of the readers.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parent
SPIKE, LOST = 100, 132  # indices of the records where the loss leaps, and from where on it is not finite


@dataclass(frozen=True)
class MadeRun:
    "What every file says: series of equal length, in the digits that are printed."

    step: np.ndarray  # optimizer steps, every fifth
    loss: np.ndarray  # nats, four decimals
    grad_norm: np.ndarray  # three decimals
    lr: np.ndarray  # two digits

    def rows(self) -> Iterator[tuple[int, float, float, float]]:
        "Step, loss, gradient norm and learning rate of every record."
        series = (self.step, self.loss, self.grad_norm, self.lr)
        return zip(*(values.tolist() for values in series), strict=True)


def made_run(n: int = 140) -> MadeRun:
    "The run: it falls from 6 to 2 nats, leaps by 3 and falls back, and is lost for the last eight."
    rng, record = np.random.default_rng(0), np.arange(n)
    loss = 2 + 4 * np.exp(-record / 30) + 0.02 * rng.standard_normal(n)
    grad_norm = 0.5 * np.exp(0.1 * rng.standard_normal(n))
    loss[SPIKE : SPIKE + 2] += (3.0, 1.0)
    grad_norm[SPIKE : SPIKE + 2] *= (40, 8)
    loss[LOST:] = np.nan
    warmup = np.minimum(1, (record + 1) / 10)
    lr = np.array([float(f"{3e-4 * share:.1e}") for share in warmup])
    return MadeRun(5 * record + 5, loss.round(4), grad_norm.round(3), lr)


RUN = made_run()
LAST = int(RUN.step[-1])


def lines(line: Callable[[int, float, float, float], str]) -> str:
    "A line, or several, for every record."
    return "".join(line(*row) + "\n" for row in RUN.rows())


def table(header: str, line: Callable[[int, float, float, float], str]) -> str:
    "A header and a line for every record."
    return header + "\n" + lines(line)


def entries(names: tuple[str, str, str, str]) -> list[dict]:
    "A dict for every record, with the names that a trainer gives to step, loss, gradient norm and rate."
    return [dict(zip(names, row, strict=True)) for row in RUN.rows()]


def megatron(step: int, loss: float, norm: float, lr: float) -> str:
    return (
        f" iteration {step:8d}/{LAST:8d} | elapsed time per iteration (ms): 512.3 | learning rate: {lr:.3E} |"
        f" global batch size:    32 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {norm:.3f} |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def composer(step: int, loss: float, norm: float, lr: float) -> str:
    front = f"[batch={step}/{LAST}]:\n\t Train "
    return f"{front}loss/train/total: {loss:.4f}\n\t Train l2_norm/grad/global: {norm:.3f}"


def hf_stdout(step: int, loss: float, norm: float, lr: float) -> str:
    row = {"loss": loss, "grad_norm": norm, "learning_rate": lr, "epoch": round(step / LAST, 4)}
    return f"{100 * step // LAST:3d}%|#         | {step}/{LAST} [00:{step % 60:02d}<01:00, 4.10it/s]{row}"


def torchtitan(step: int, loss: float, norm: float, lr: float) -> str:
    front = f"[rank0]:[titan] 2025-01-01 00:00:00,000 - root - INFO - step: {step:2d}"
    return f"{front}  loss: {loss:7.4f}  grad_norm: {norm:6.3f}  memory: 30.99GiB(32.62%)  tps: 7,034"


def fairseq(step: int, loss: float, norm: float, lr: float) -> str:
    return (
        f"2022-01-01 00:00:00 | INFO | train_inner | epoch 001: {step:5d} / {LAST} loss={loss:.4f}, ppl=9.9,"
        f" wps=1000, num_updates={step}, lr={lr:.1e}, gnorm={norm:.3f}, loss_scale=1"
    )


def idefics(step: int, loss: float, norm: float, lr: float) -> str:
    return (
        f"iteration: {step}/{LAST} 0% | elapsed time: 01:02:03 | per_token_loss: {loss:.4f} | lr: {lr:.1E} |"
        f" grad_norm: {norm:.3f}"
    )


def modded(step: int, loss: float, norm: float, lr: float) -> str:
    return f"step:{step}/{LAST} train_loss:{loss:.4f} train_time:{30 * step}ms step_avg:30.00ms"


def llmc(step: int, loss: float, norm: float, lr: float) -> str:
    return (
        f"step {step:4d}/{LAST} | loss {loss:.6f} (+0.10z)| norm {norm:.4f} (+0.20z)| lr {lr:.2e} |"
        " 4180.55 ms | 32.3% bf16 MFU | 125000 tok/s"
    )


def trainer_state() -> str:
    names = ("step", "loss", "grad_norm", "learning_rate")
    return json.dumps({"global_step": LAST, "max_steps": LAST, "log_history": entries(names)}, indent=0)


def golden() -> str:
    keys = [str(step) for step in RUN.step.tolist()]
    series = {"lm loss": RUN.loss, "grad-norm": RUN.grad_norm}
    grid = {"start_step": 5, "end_step": LAST, "step_interval": 5}
    told = {
        name: grid
        | {"values": {k: "nan" if v != v else v for k, v in zip(keys, values.tolist(), strict=True)}}
        for name, values in series.items()
    }
    return json.dumps(told, indent=0)


def numbers() -> str:
    return json.dumps(RUN.loss.tolist())


def deepxde(step: int, loss: float, norm: float, lr: float) -> str:
    return f"{step:<9d} [{loss:.4f}]    [{loss:.4f}]    []"


def clearml() -> str:
    return json.dumps({"loss": {"train": {"x": RUN.step.tolist(), "y": RUN.loss.tolist()}}})


def tensorboard_json() -> str:
    return json.dumps([[1.7e9 + step, step, loss] for step, loss, *_ in RUN.rows()])


def jsonl(names: tuple[str, str, str, str], **more: object) -> str:
    return "".join(json.dumps(row | more) + "\n" for row in entries(names))


def long_row(step: int, loss: float, norm: float, lr: float) -> str:
    front = '"made","7f3a"'
    rows = (
        (name, step, 1_700_000_000 + step, value) for name, value in (("loss", loss), ("grad_norm", norm))
    )
    return "\n".join(front + "".join(f',"{cell}"' for cell in row) for row in rows)


ALL, LOSS = ("loss", "grad_norm", "lr"), ("loss",)
# name of the format -> (file, its text, which series of `RUN` it holds)
LOGS = {
    "megatron": ("megatron.out", lambda: lines(megatron), ALL),
    "nanogpt": (
        "nanogpt.log",
        lambda: lines(lambda s, x, g, r: f"iter {s}: loss {x:.4f}, time 92.59ms, mfu 0.34%"),
        LOSS,
    ),
    "nanochat": (
        "nanochat.log",
        lambda: lines(
            lambda s, x, g, r: f"step {s:05d}/00400 ({s / 4:.2f}%) | loss: {x:.6f} | lrm: 1.00 | dt: 300.00ms"
        ),
        LOSS,
    ),
    "build_nanogpt": (
        "build_nanogpt.log",
        lambda: lines(
            lambda s, x, g, r: (
                f"step {s:5d} | loss: {x:.6f} | lr {r:.4e} | norm: {g:.4f} | dt: 300.00ms | tok/sec: 1700.00"
            )
        ),
        ALL,
    ),
    "llmc": ("llmc.log", lambda: lines(llmc), ALL),
    "llmc_main": (
        "main.log",
        lambda: lines(lambda s, x, g, r: f"s:{s} trl:{x:.4f} lr:{r:.6f} norm:{g:.3f}"),
        ALL,
    ),
    "modded_nanogpt": ("modded.log", lambda: lines(modded), LOSS),
    "fairseq": ("fairseq.log", lambda: lines(fairseq), ALL),
    "hf_stdout": ("hf_trainer.out", lambda: lines(hf_stdout), ALL),
    "idefics": ("idefics.log", lambda: lines(idefics), ALL),
    "composer": ("composer.log", lambda: lines(composer), ("loss", "grad_norm")),
    "torchtitan": ("torchtitan.log", lambda: lines(torchtitan), ("loss", "grad_norm")),
    "step_value": ("loss.txt", lambda: lines(lambda s, x, g, r: f"{s} {x:.4f}"), LOSS),
    "deepxde": ("deepxde.out", lambda: lines(deepxde), LOSS),
    "numbers": ("train_losses.txt", numbers, LOSS),
    "generic": (
        "own_loop.log",
        lambda: lines(lambda s, x, g, r: f"step {s}: loss={x:.4f} grad_norm={g:.3f} lr={r:.1e}"),
        ALL,
    ),
    "trainer_state": ("trainer_state.json", trainer_state, ALL),
    "golden_json": ("golden_values.json", golden, ("loss", "grad_norm")),
    "clearml_json": ("scalars.json", clearml, LOSS),
    "tensorboard_json": ("run-made-tag-loss.json", tensorboard_json, LOSS),
    "json_table": ("metrics.jsonl", lambda: jsonl(("step", "loss", "grad_norm", "lr")), ALL),
    "llama_factory": (
        "trainer_log.jsonl",
        lambda: jsonl(("current_steps", "loss", "grad_norm", "lr"), total_steps=LAST),
        ALL,
    ),
    "csv_table": (
        "metrics.csv",
        lambda: table("step,loss,grad_norm,lr", lambda *row: ",".join(map(str, row))),
        ALL,
    ),
    "lightning_csv": (
        "lightning/metrics.csv",
        lambda: table("epoch,lr-AdamW,step,train_loss", lambda s, x, g, r: f"0,{r},{s},{x}"),
        ("loss", "lr"),
    ),
    "tensorboard_csv": (
        "run-made-tag-loss.csv",
        lambda: table("Wall time,Step,Value", lambda s, x, g, r: f"{1_700_000_000 + s}.0,{s},{x}"),
        LOSS,
    ),
    "wandb_csv": (
        "wandb_chart.csv",
        lambda: table(
            '"Step","made - loss","made - loss__MIN","made - loss__MAX"',
            lambda s, x, g, r: f'"{s}","{x}","{x}","{x}"',
        ),
        LOSS,
    ),
    "long_table": (
        "comet.csv",
        lambda: table('"Run","Run ID","metric","step","timestamp","value"', long_row),
        ("loss", "grad_norm"),
    ),
    "mlflow": (
        "mlruns/metrics/loss",
        lambda: lines(lambda s, x, g, r: f"{1_700_000_000_000 + s} {x} {s}"),
        LOSS,
    ),
}


def main() -> None:
    "Write every file."
    for name, text, _ in LOGS.values():
        (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / name).write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
