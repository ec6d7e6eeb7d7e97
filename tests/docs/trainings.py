"""Small trainings of ours that fail in a known way: the logs behind the figures of the symptom pages.

Each takes some seconds of a CPU and returns the rows that a training loop would log.
"""

import math
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

Rows = list[dict]
STEPS, CLASSES, INPUTS = 1500, 10, 20


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    "One step down the gradient of a loss."
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@dataclass
class Classifier:
    "A small network that learns the classes of a fixed random teacher."

    seed: int = 0
    lr: float = 3e-3
    samples: int = 0  # of the training set; 0: every batch is fresh
    wide: int = 64
    rows: int = 64  # of a batch
    network: nn.Module = field(init=False)

    def __post_init__(self):
        torch.manual_seed(0)
        self.teacher = nn.Sequential(nn.Linear(INPUTS, 32), nn.Tanh(), nn.Linear(32, CLASSES))
        self.held_out = self.fresh(2000, torch.Generator().manual_seed(1))
        self.kept = self.fresh(self.samples, torch.Generator().manual_seed(2)) if self.samples else None
        torch.manual_seed(self.seed)
        self.network = nn.Sequential(nn.Linear(INPUTS, self.wide), nn.ReLU(), nn.Linear(self.wide, CLASSES))
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=self.lr)

    def fresh(self, rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        "Inputs and their classes."
        inputs = torch.randn(rows, INPUTS, generator=generator)
        return inputs, (6 * self.teacher(inputs)).detach().argmax(1)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        "The batch of a step, the same in every run."
        generator = torch.Generator().manual_seed(1000 + step)
        if self.kept is None:
            return self.fresh(self.rows, generator)
        rows = torch.randint(self.samples, (self.rows,), generator=generator)
        return self.kept[0][rows], self.kept[1][rows]

    def train(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict:
        "Loss and gradient norm of one step."
        loss = F.cross_entropy(self.network(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), math.inf)
        self.optimizer.step()
        return {"loss": loss.item(), "grad_norm": norm.item()}

    def validation(self, step: int) -> dict:
        "The loss of the held-out samples, at every 25th step."
        if step % 25:
            return {}
        with torch.no_grad():
            return {"val_loss": F.cross_entropy(self.network(self.held_out[0]), self.held_out[1]).item()}


def train_with(change: Callable, run: Classifier, steps: int = STEPS) -> Rows:
    "A run whose batches pass through `change(step, inputs, targets)`."
    rows = []
    for step in range(steps):
        row = run.train(*change(step, *run.batch(step)))
        rows.append({"step": step} | row | run.validation(step))
    return rows


def overfitted() -> Rows:
    "A network that sees 300 samples again and again."
    return train_with(lambda step, inputs, targets: (inputs, targets), Classifier(samples=300, wide=256))


def shifted() -> Rows:
    "From step 800 on, only samples near the boundary of their class are drawn."
    run = Classifier()

    def harder(step: int, inputs: torch.Tensor, targets: torch.Tensor) -> tuple:
        if step < 800:
            return inputs, targets
        inputs, targets = run.fresh(640, torch.Generator().manual_seed(step))
        best = (6 * run.teacher(inputs)).topk(2, dim=1).values
        rows = (best[:, 0] - best[:, 1]).argsort()[:64]
        return inputs[rows], targets[rows]

    return train_with(harder, run)


def leaked() -> Rows:
    "The class of a sample stands among its inputs."
    run = Classifier(lr=1e-2)

    def with_answer(step: int, inputs: torch.Tensor, targets: torch.Tensor) -> tuple:
        inputs = inputs.clone()
        inputs[:, :CLASSES] = 4.0 * F.one_hot(targets, CLASSES)
        return inputs, targets

    run.held_out = with_answer(0, *run.held_out)
    return train_with(with_answer, run)


def noisier() -> Rows:
    "A share of wrong labels that grows from step 500 to 900 and falls again."
    draw = torch.Generator().manual_seed(3)

    def wrong(step: int, inputs: torch.Tensor, targets: torch.Tensor) -> tuple:
        share = 0.1 * max(0.0, 1 - abs(step - 900) / 400)
        is_wrong = torch.rand(len(targets), generator=draw) < share
        return inputs, torch.where(is_wrong, (targets + 1) % CLASSES, targets)

    return train_with(wrong, Classifier())


def bad_batches(seed: int, steps: tuple[int, ...]) -> Rows:
    "A run whose batches of some steps have shuffled labels and inputs four times as large."

    def broken(step: int, inputs: torch.Tensor, targets: torch.Tensor) -> tuple:
        return (4 * inputs, targets.roll(1)) if step in steps else (inputs, targets)

    return train_with(broken, Classifier(seed=seed))


def same_bad_batches() -> dict[str, Rows]:
    "Two seeds that see the same four bad batches, and one more each."
    shared = (300, 620, 910, 1240)
    return {"seed 0": bad_batches(0, (*shared, 450)), "seed 1": bad_batches(1, (*shared, 1100))}


def resumed(run: Classifier, stopped: int, saved_at: int, change: Callable = lambda run: None) -> Rows:
    "A run that stops at a step and goes on from an earlier one, after `change(run)`."
    rows, saved = [], {}
    for step in range(stopped):
        if step == saved_at:
            saved = {name: value.clone() for name, value in run.network.state_dict().items()}
        rows.append({"step": step} | run.train(*run.batch(step)))
    run.network.load_state_dict(saved)
    change(run)
    for step in range(saved_at, STEPS):
        rows.append({"step": step} | run.train(*run.batch(step)))
        for group in run.optimizer.param_groups:
            group["lr"] = max(run.lr, 0.92 * group["lr"])
    return rows


def without_moments(run: Classifier) -> None:
    "The state of the optimizer is gone, and its rate begins ten times too high."
    run.optimizer = torch.optim.Adam(run.network.parameters(), lr=10 * run.lr)


def log_of_zero() -> Rows:
    "A loss that takes the logarithm of a probability, which becomes 0."
    run, rows = Classifier(lr=0.2), []
    for step in range(400):
        inputs, targets = run.batch(step)
        for group in run.optimizer.param_groups:
            group["lr"] = 3e-3 * 1.02**step
        chosen = run.network(inputs).softmax(1)[torch.arange(len(targets)), targets]
        loss = -chosen.log().mean()
        descend(run.optimizer, loss)
        rows.append({"step": step, "loss": loss.item(), "lr": run.optimizer.param_groups[0]["lr"]})
    return rows


def overflowing() -> Rows:
    "A run in fp16 with a loss scaler; from step 700 on an input is too large for the format."
    run, rows = Classifier(), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=200)
    for step in range(1000):
        inputs, targets = run.batch(step)
        if step >= 700:
            inputs = inputs.clone()
            inputs[:, 0] *= 1e6
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(run.network(inputs), targets)
        run.optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
        rows.append({"step": step, "loss": loss.item(), "loss_scale": scaler.get_scale()})
    return rows


def two_modes() -> Rows:
    "A deep linear network from small weights: it learns one direction, waits, and learns the second."
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    for layer in network:
        nn.init.normal_(layer.weight, std=0.02)
        layer.weight.data += torch.diag(torch.tensor([0.5] + 7 * [0.13]))
    target = torch.diag(torch.tensor([3.0, 1.0, 0, 0, 0, 0, 0, 0]))
    optimizer, rows = torch.optim.SGD(network.parameters(), lr=0.02), []
    for step in range(STEPS):
        inputs = torch.randn(256, 8)
        loss = (network(inputs) - inputs @ target - 0.3 * torch.randn(256, 8)).square().mean()
        descend(optimizer, loss)
        rows.append({"step": step, "loss": loss.item()})
    return rows


def uneven_lengths() -> Rows:
    "Texts of uneven length, a micro-batch each, whose losses are averaged as means."
    torch.manual_seed(0)
    table = nn.Embedding(33, 32)  # the logits of the next token; 32 begins a text
    optimizer, rows = torch.optim.Adam(table.parameters(), lr=0.02), []
    for step in range(600):
        lengths = torch.exp(torch.randn(4) + 1.5).long().clamp(2, 200)
        losses = []
        for n in lengths:
            tokens = (torch.randint(32, ()) + torch.arange(int(n))) % 32
            before = torch.cat([torch.tensor([32]), tokens[:-1]])
            losses.append(F.cross_entropy(table(before), tokens))
        loss = torch.stack(losses).mean()
        descend(optimizer, loss)
        rows.append({"step": step, "loss": loss.item(), "tokens_per_step": int(lengths.sum())})
    return rows


def timed(work: Callable[[int], float], steps: int) -> Iterator[tuple[int, dict]]:
    "Steps of a training with their seconds; `work` runs in each and returns the seconds spent on data."
    run = Classifier(wide=512)
    for step in range(steps):
        begin = time.perf_counter()
        waited = work(step)
        row = run.train(*run.batch(step))
        yield step, {"step": step} | row | {"step_time": time.perf_counter() - begin, "data_time": waited}


def waiting_for_data() -> Rows:
    "From step 300 on, the loader needs 15 ms for a batch."

    def load(step: int) -> float:
        begin = time.perf_counter()
        time.sleep(0.015 if step >= 300 else 0)
        return time.perf_counter() - begin

    return [row for _, row in timed(load, 700)]


def saved_too_often() -> Rows:
    "From step 400 to 649 a checkpoint is written at every step."
    big = torch.zeros(4_000_000)

    def save(step: int) -> float:
        if 400 <= step < 650:
            with tempfile.TemporaryDirectory() as folder:
                torch.save(big, Path(folder) / "model.pt")
        return 0.0

    return [{k: v for k, v in row.items() if k != "data_time"} for _, row in timed(save, 1000)]


def kept_graphs() -> Rows:
    "A loop that adds up its losses with their graphs; what the process holds is read from Linux."
    run, total, rows = Classifier(wide=2048), torch.zeros(()), []
    for step in range(300):
        inputs, targets = run.batch(step)
        total = total + F.cross_entropy(run.network(inputs), targets)  # should be `.item()`
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        rows.append({"step": step} | run.train(inputs, targets) | {"memory": pages * 4096 / 2**30})
    return rows


@dataclass
class Policy:
    "A policy that writes short texts and learns from their rewards by comparing the answers of a group."

    lr: float = 0.05
    entropy_bonus: float = 0.0
    ends: bool = False  # whether token 0 ends an answer
    strict: bool = False  # whether only a whole answer is rewarded
    length: int = 8
    sharp: float = 0.0  # how far the policy begins at the right answer
    tokens: int = 8
    group: int = 8
    groups: int = 16  # of each update

    def __post_init__(self):
        torch.manual_seed(0)
        self.answer = torch.randint(1, self.tokens, (self.length,))
        start = self.sharp * F.one_hot(self.answer, self.tokens).float()
        self.logits = nn.Parameter(start + 0.01 * torch.randn(self.length, self.tokens))
        self.optimizer = torch.optim.Adam([self.logits], lr=self.lr)

    def rewards(self, texts: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        "The share of right tokens before an answer ends; with `ends`, its length."
        if self.ends:
            return alive.float().mean(-1)
        right = (texts == self.answer).float()
        return right.prod(-1) if self.strict else right.mean(-1)

    def step(self) -> dict:
        "One update, with what trainers log of it."
        old = self.logits.log_softmax(1)
        shape = (self.groups, self.group, self.length)
        texts = torch.multinomial(old.exp().detach(), self.groups * self.group, replacement=True)
        texts = texts.T.reshape(shape)
        ended = (texts == 0).long().cumsum(-1) if self.ends else torch.zeros(shape, dtype=torch.long)
        alive = ended == 0
        reward = self.rewards(texts, alive)
        spread = reward.std(1, keepdim=True)
        advantage = (reward - reward.mean(1, keepdim=True)) / (spread + 1e-4)
        chosen = old.gather(1, texts.reshape(-1, self.length).T).T.reshape(shape)
        entropy = -(old.exp() * old).sum(1).mean()
        loss = -(advantage[..., None] * chosen).mean() - self.entropy_bonus * entropy
        descend(self.optimizer, loss)
        new = self.logits.detach().log_softmax(1)
        kl = (old.exp() * (old - new)).sum(1).mean().item()
        return {
            "loss": loss.item(),
            "reward": reward.mean().item(),
            "entropy": entropy.item(),
            "kl": kl,
            "frac_reward_zero_std": (spread == 0).float().mean().item(),
            "completions/clipped_ratio": alive[..., -1].float().mean().item(),
        }


def learn(policy: Policy, steps: int, at: int = -1, factor: float = 1.0, only: tuple[str, ...] = ()) -> Rows:
    "The log of a policy, whose learning rate may be multiplied for one step."
    rows = []
    for step in range(steps):
        for group in policy.optimizer.param_groups:
            group["lr"] = policy.lr * (factor if step == at else 1.0)
        row = policy.step()
        rows.append({"step": step} | {k: v for k, v in row.items() if not only or k in only})
    return rows


_SEEN = ("loss", "reward", "entropy", "kl")
_ALIKE, _CUT = ("loss", "reward", "frac_reward_zero_std"), ("loss", "reward", "completions/clipped_ratio")


class Reader(nn.Module):
    "One head that copies the value of the key that a query asks for."

    def __init__(self, keys: int = 12, wide: int = 16):
        super().__init__()
        torch.manual_seed(0)
        self.keys, self.embed = keys, nn.Embedding(keys, wide)
        self.query, self.key = nn.Linear(wide, wide), nn.Linear(wide, wide)
        self.values, self.head = nn.Embedding(CLASSES, wide), nn.Linear(wide, CLASSES)

    def forward(self, order: torch.Tensor, values: torch.Tensor, asked: torch.Tensor) -> tuple:
        "Logits of the value, and the entropy of the attention row in nats."
        scores = (self.query(self.embed(asked))[:, None] * self.key(self.embed(order))).sum(-1)
        weights = scores.softmax(-1)
        entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1).mean()
        return self.head((weights[..., None] * self.values(values)).sum(1)), entropy


def sharpening() -> Rows:
    "A head that learns to read one position."
    model, rows = Reader(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    for step in range(600):
        order = torch.rand(64, model.keys).argsort(1)
        values = torch.randint(CLASSES, (64, model.keys))
        at = torch.randint(model.keys, (64,))
        picked = torch.arange(64), at
        logits, entropy = model(order, values, order[picked])
        loss = F.cross_entropy(logits, values[picked])
        descend(optimizer, loss)
        rows.append({"step": step, "loss": loss.item(), "attention_entropy": entropy.item()})
    return rows


def drifting() -> Rows:
    "A bigram model in which Adam, with a short memory, pushes the logits of rare tokens down at every step."
    torch.manual_seed(0)
    share = 1 / torch.arange(1.0, 201)
    table = nn.Embedding(len(share), len(share))
    nn.init.zeros_(table.weight)
    optimizer, rows = torch.optim.Adam(table.parameters(), lr=0.3, betas=(0.9, 0.95)), []
    for step in range(2500):
        before, after = torch.multinomial(share, 128, replacement=True).view(2, 64)
        logits = table(before)
        loss = F.cross_entropy(logits, after)
        descend(optimizer, loss)
        log_z = logits.detach().logsumexp(1).mean()
        rows.append({"step": step, "loss": loss.item(), "log_z": log_z.item()})
    return rows


def smaller_batch() -> Rows:
    "A run that is resumed at step 700 with an eighth of its batch size, which it logs."
    rows = resumed(Classifier(), 720, 700, lambda run: setattr(run, "rows", 8))
    return [row | {"batch_size": 64 if i < 720 else 8} for i, row in enumerate(rows)]


def label_out_of_range() -> str:
    "What a program printed that met a label which is no class at step 700."
    run, lines = Classifier(), []
    try:
        for step in range(1000):
            inputs, targets = run.batch(step)
            row = run.train(inputs, targets + CLASSES * (step == 700))
            lines.append(f"step {step} loss {row['loss']:.4f} grad_norm {row['grad_norm']:.3f}")
    except IndexError:
        lines.append(traceback.format_exc())
    return "\n".join(lines)


RUNS: dict[str, tuple[str, Callable]] = {  # kind -> what was done to the run, and its rows or its text
    "overfitting": ("A small network that sees the same 300 samples again and again", overfitted),
    "level_shift": ("A classifier that is given harder samples from step 800 on", shifted),
    "leak_suspected": ("A classifier whose inputs hold the answer", leaked),
    "slow_rise": ("A classifier with a share of wrong labels that grows and falls again", noisier),
    "data_driven_spike": (
        "Two seeds that see the same four bad batches, and one more each",
        same_bad_batches,
    ),
    "resume_spike": (
        "A classifier resumed at step 700 without the state of Adam and at ten times its rate",
        lambda: resumed(Classifier(lr=1e-2), 720, 700, without_moments),
    ),
    "restart": (
        "A classifier that went back from step 900 to its checkpoint of step 750",
        lambda: resumed(Classifier(), 900, 750),
    ),
    "non_finite": ("A classifier whose loss takes the logarithm of a probability that became 0", log_of_zero),
    "loss_scale_collapse": ("A classifier in fp16 whose inputs overflow from step 700 on", overflowing),
    "attention_entropy_collapse": ("A head that learns to read one position", sharpening),
    "output_logit_drift": (
        "A bigram model in which Adam pushes the logits of rare tokens down at every step",
        drifting,
    ),
    "environment_change": ("A classifier resumed with an eighth of its batch size", smaller_batch),
    "crash": ("A classifier that met a label which is no class", label_out_of_range),
    "plateau": ("A deep linear network from small weights", two_modes),
    "length_bias": ("A bigram model with a text a micro-batch, averaged as means", uneven_lengths),
    "data_stall": ("A classifier whose loader needs 15 ms a batch from step 300 on", waiting_for_data),
    "throughput_drop": ("A classifier that writes a checkpoint at each of 250 steps", saved_too_often),
    "memory_growth": ("A classifier whose loop sums up its losses with their graphs", kept_graphs),
    "policy_entropy_collapse": (
        "A small policy trained by GRPO on four answers an update, at a rate that is too high",
        lambda: learn(Policy(lr=1.0, groups=1, group=4), 200, only=_SEEN),
    ),
    "policy_entropy_rise": (
        "A small policy trained by GRPO with a large entropy bonus",
        lambda: learn(Policy(sharp=5.0, entropy_bonus=2.0, lr=0.05), 250, only=_SEEN),
    ),
    "policy_step_too_large": (
        "A small policy trained by GRPO with one step at forty times its rate",
        lambda: learn(Policy(), 200, at=25, factor=40, only=_SEEN),
    ),
    "reward_collapse": (
        "A small policy trained by GRPO, lost by one update of the wrong sign and a thousand times its size",
        lambda: learn(Policy(lr=0.02), 400, at=200, factor=-1000, only=_SEEN),
    ),
    "zero_advantage": (
        "A small policy trained by GRPO whose answers became all alike",
        lambda: learn(Policy(lr=0.3, strict=True, length=2), 200, only=_ALIKE),
    ),
    "answers_cut": (
        "A small policy trained by GRPO that is rewarded for long answers",
        lambda: learn(Policy(ends=True, length=24), 200, only=_CUT),
    ),
}
