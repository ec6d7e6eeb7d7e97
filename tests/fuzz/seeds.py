"One good input of every reader, and how a stranger may spoil it."

import io
import json
import random
import struct
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "data_samples" / "lm_high_lr"

LINES = {  # a record of every text format; `{s}` is the step, `{v}` a value
    "nanogpt": "iter {s}: loss {v}, time 1092.59ms, mfu 0.34%",
    "build_nanogpt": "step {s:5d} | loss: {v} | lr 6.0000e-04 | norm: 2.1000 | dt: 300.00ms",
    "composer": "[batch={s}/1000]:\n Train loss/train/total: {v}\n Train time/token: 1000",
    "deepspeed": "[2024-01-01 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step={s}, skipped=6,"
    " lr=[9.6e-06], mom=[(0.9, 0.95)]\nEpoch: 0 | Step: {s} | Loss: {v}",
    "fairseq": "2024-01-01 10:00:00 | INFO | train_inner | epoch 001: {s} / 999 loss={v},"
    " num_updates={s}, gnorm=1.2",
    "generic": "step {s}: loss={v} lr=1e-4",
    "hf_stdout": "{{'loss': {v}, 'grad_norm': 4.03, 'learning_rate': 5.7e-05, 'epoch': 0.{s:04d}}}",
    "idefics": "iteration: {s}/500000 0% | elapsed time: 01:02:03 | per_token_loss: {v} | lr: 1.0E-05 |",
    "kernel": "[  100.{s:06d}] NVRM: Xid (PCI:0000:3b:00): 63, pid=1234, Row Remapper {v}",
    "llmc": "step {s}/19560 | loss {v} (+nanz)| norm 0.8 (+nanz)| lr 8.14e-05 | 4180.55 ms | 32.3% bf16 MFU"
    " | 125516 tok/s",
    "llmc_main": "s:{s} trl:{v} lr:0.000600 norm:2.1",
    "megatron": " [2024-01-01 10:00:00] iteration {s}/ 100 | consumed samples: 100 | lm loss: {v}E+00 |"
    " loss scale: 1.0 | grad norm: 0.2 | number of skipped iterations: 0 |",
    "modded": "step:{s}/1000 val_loss:{v} train_time:30ms step_avg:28ms",
    "step_value": "{s} {v}",
    "torchtitan": "[rank0]:[titan] 2024-01-01 10:00:00,123 - root - INFO - step: {s}  loss: {v}  memory:"
    " 30.99GiB(32.62%)  tps: 7,034  mfu: 41.19%",
    "keras": "Epoch {s}/100\n10/10 [=====] - 1s 10ms/step - loss: {v} - val_loss: 2.5",
    "jsonl": '{{"step": {s}, "loss": {v}, "lr": 0.001}}',
    "llama_factory": '{{"current_steps": {s}, "total_steps": 100, "loss": {v}, "lr": 1e-5}}',
    "csv": "{s},{v},0.001",
    "lightning": "0,{s},{v},2.5",
}
HEADS = {"csv": "step,loss,lr\n", "lightning": "epoch,step,train_loss,val_loss\n"}


def text_seeds() -> dict[str, bytes]:
    "A short falling loss in every text format."
    seeds = {}
    for name, line in LINES.items():
        lines = [line.format(s=10 * i, v=f"{3 - 0.05 * i:.4f}") for i in range(24)]
        seeds[name] = (HEADS.get(name, "") + "\n".join(lines) + "\n").encode()
    return seeds


def table_seeds() -> dict[str, bytes]:
    "The JSON and CSV files of trackers."
    steps = range(1, 25)
    history = [{"loss": 3 - 0.05 * i, "learning_rate": 1e-5, "step": i, "epoch": i / 24} for i in steps]
    golden = {"start_step": 1, "end_step": 24, "step_interval": 1, "values": {str(i): 3.0 for i in steps}}
    rows = "".join(f'"{i}","{3 - i / 20}","{3 - i / 20}","{3 - i / 20}"\n' for i in steps)
    whole = {
        "trainer_state": json.dumps({"log_history": history, "global_step": 24}),
        "golden_json": json.dumps({"lm loss": golden}),
        "tensorboard_json": json.dumps([[1.7e9 + i, i, 3 - i / 20] for i in steps]),
        "json_table": json.dumps(history),
        "tensorboard_csv": "Wall time,Step,Value\n"
        + "".join(f"{1.7e9 + i},{i},{3 - i / 20}\n" for i in steps),
        "wandb_csv": '"Step","a - loss","a - loss__MIN","a - loss__MAX"\n' + rows,
    }
    return {name: text.encode() for name, text in whole.items()}


def _crc(data: bytes) -> int:
    "The masked CRC-32C of TFRecord files, bit by bit."
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 & -(crc & 1))
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _event(step: int, value: float) -> bytes:
    "One TensorBoard scalar as a record."
    tag = b"\x0a\x04loss\x15" + struct.pack("<f", value)
    summary = b"\x0a" + bytes([len(tag)]) + tag
    event = (
        b"\x09" + struct.pack("<d", 1.7e9 + step) + b"\x10" + bytes([step]) + b"\x2a" + bytes([len(summary)])
    )
    return _framed(event + summary)


def _framed(event: bytes) -> bytes:
    "A message as TFRecord has it: its length and it, each with its checksum."
    size = struct.pack("<Q", len(event))
    return size + struct.pack("<I", _crc(size)) + event + struct.pack("<I", _crc(event))


def event_file() -> bytes:
    "An event file of 24 scalars; the first record says what it is."
    version = b"\x09" + struct.pack("<d", 1.7e9) + b"\x1a\x0dbrain.Event:2"
    return _framed(version) + b"".join(_event(i, 3 - i / 20) for i in range(24))


def binary_seeds() -> dict[str, bytes]:
    "The binary logs."
    curves = io.BytesIO()
    torch.save({"steps": list(range(24)), "lm_losses": [3 - i / 20 for i in range(24)]}, curves)
    record = b"\x0a\x10\x12\x0e\x0a\x04loss\x12\x032.5" + b"\x10\x01"
    head = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
    wandb = head + struct.pack("<IHB", 0, len(record), 1) + record
    return {
        "events.out.tfevents.1": event_file(),
        "run-1.wandb": wandb,
        "curves.pt": curves.getvalue(),
    }


def checkpoint_seeds() -> dict[str, bytes]:
    "Checkpoints of one file, small."
    model = torch.nn.Linear(3, 2)
    values = {"model": model.state_dict(), "args": {"lr": 1e-3}, "n": np.float64(2.0), "m": model}
    new, old = io.BytesIO(), io.BytesIO()
    torch.save(values, new)
    torch.save(values, old, _use_new_zipfile_serialization=False)
    return {
        "new.pt": new.getvalue(),
        "old.bin": old.getvalue(),
        "a.safetensors": save({"w": torch.ones(3, 2)}),
    }


def pickle_seeds() -> list[bytes]:
    "Pickles alone: those inside torch files, of every protocol."
    import pickle
    import zipfile

    with zipfile.ZipFile(io.BytesIO(checkpoint_seeds()["new.pt"])) as archive:
        inside = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    plain = {"a": [1, 2.5, "x", None, True], "b": {3}, "c": (1, b"y"), "n": np.float32(2), "z": np.ones(3)}
    return [inside, *(pickle.dumps(plain, protocol) for protocol in range(6))]


WORDS = [
    b"nan",
    b"inf",
    b"-1",
    b"9223372036854775808",
    b"1e400",
    b"9" * 400,
    b"0x10",
    b"\0",
    b"\xff\xfe",
    b"\r",
]
WORDS += [
    b"1,000",
    b"\x1b[31m",
    b"{",
    b"}",
    b'"',
    b"loss",
    b"step",
    b"\n\n",
    b"-",
    b",",
    b"None",
    b"[[[[",
    b"a" * 3000,
]


def spoil(data: bytes, chance: random.Random) -> bytes:
    "A few changes: bits, cuts, copies, words, shuffled lines, another encoding."
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        out = _spoil_once(out, chance)
    return bytes(out[: 2**17])


def _spoil_once(out: bytearray, chance: random.Random) -> bytearray:
    "One change."
    size = len(out)
    at, other = chance.randrange(size + 1), chance.randrange(size + 1)
    low, high = min(at, other), max(at, other)
    match chance.randrange(9):
        case 0 if size:
            out[at % size] ^= 1 << chance.randrange(8)
        case 1:
            out[at:at] = chance.choice(WORDS)
        case 2:
            del out[low : min(high, low + 40)]
        case 3:
            out[at:at] = out[low:high][:500]
        case 4:
            del out[max(at, 1) :]
        case 5:
            lines = bytes(out).split(b"\n")
            chance.shuffle(lines)
            out = bytearray(b"\n".join(lines))
        case 6 if size:
            out[at % size] = chance.choice(b"0123456789.eE-+,:;|{}[]\"'\x00\x80\xff ")
        case 7 if chance.random() < 0.1:
            out = bytearray(bytes(out).decode("latin-1").encode("utf-16"))
        case _:
            out[low : min(high, low + 12)] = chance.randbytes(min(high - low, 12))
    return out
