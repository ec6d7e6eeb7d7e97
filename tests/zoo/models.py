"Nine small architectures with their data: what a row of the zoo trains."

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from stabilitylab.models.decoder import LanguageModel
from stabilitylab.models.parts import ModelConfig
from stabilitylab.models.tasks import stdlib_bytes

SEQ, CLASSES = 32, 10
_TEXT: list[torch.Tensor] = []


def text() -> torch.Tensor:
    "Bytes of the standard library, read once."
    if not _TEXT:
        _TEXT.append(torch.from_numpy(stdlib_bytes(200_000).astype("int64")))
    return _TEXT[0]


def text_batch(generator: torch.Generator, rows: int = 16) -> dict:
    "Windows of text and the bytes that follow."
    data = text()
    at = torch.randint(0, len(data) - SEQ - 1, (rows, 1), generator=generator) + torch.arange(SEQ + 1)
    window = data[at]
    return {"tokens": window[:, :-1].clone(), "targets": window[:, 1:].clone()}


def _prototypes(*shape: int) -> torch.Tensor:
    "One picture or vector a class."
    return torch.randn(CLASSES, *shape, generator=torch.Generator().manual_seed(99))


def class_batch(*shape: int, noise: float = 1.0) -> Callable:
    "(generator, rows) -> prototypes with noise, and their classes."
    prototypes = _prototypes(*shape)

    def batch(generator: torch.Generator, rows: int = 32) -> dict:
        targets = torch.randint(0, CLASSES, (rows,), generator=generator)
        x = prototypes[targets] + noise * torch.randn(rows, *shape, generator=generator)
        return {"x": x, "targets": targets}

    return batch


def reversal_batch(generator: torch.Generator, rows: int = 32) -> dict:
    "Sequences of 30 tokens and the same reversed, after a first token."
    source = torch.randint(2, 32, (rows, 10), generator=generator)
    targets = source.flip(1)
    first = torch.ones(rows, 1, dtype=torch.long)
    return {"tokens": source, "written": torch.cat([first, targets[:, :-1]], 1), "targets": targets}


def noise_batch(generator: torch.Generator, rows: int = 64) -> dict:
    "Noised pictures, the share of noise, and the noise."
    clean = _prototypes(64)[torch.randint(0, CLASSES, (rows,), generator=generator)]
    share = torch.rand(rows, 1, generator=generator)
    noise = torch.randn(rows, 64, generator=generator)
    return {"x": (1 - share).sqrt() * clean + share.sqrt() * noise, "share": share, "targets": noise}


def adding_batch(generator: torch.Generator, rows: int = 32) -> dict:
    "Sequences of which two marked numbers are to be added."
    values = torch.rand(rows, 40, 1, generator=generator)
    marks = torch.zeros(rows, 40, 1)
    at = torch.stack([torch.randperm(40, generator=generator)[:2] for _ in range(rows)])
    marks.scatter_(1, at[..., None], 1.0)
    return {"x": torch.cat([values, marks], -1), "targets": (values * marks).sum((1, 2))}


class Classifier(nn.Module):
    "A multi-layer perceptron with ReLU."

    def __init__(self, depth: int = 3, width: int = 64, leak: float = 0.0, norm: bool = False):
        super().__init__()
        layers: list[nn.Module] = []
        sides = [32] + [width] * depth
        for a, b in pairwise(sides):
            layers += [nn.Linear(a, b), *([nn.LayerNorm(b)] if norm else [])]
            layers += [nn.LeakyReLU(leak) if leak else nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class ConvNet(nn.Module):
    "Three convolutions and a linear layer."

    def __init__(self, leak: float = 0.0):
        super().__init__()
        act = (lambda: nn.LeakyReLU(leak)) if leak else nn.ReLU
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), act(), nn.Conv2d(16, 16, 3, stride=2, padding=1), act(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), act(),
        )  # fmt: skip
        self.head = nn.Linear(32 * 4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).flatten(1))


class ViT(nn.Module):
    "Patches, two encoder layers, the mean and a head."

    def __init__(self):
        super().__init__()
        self.patch, self.positions = nn.Linear(4, 32), nn.Parameter(torch.zeros(16, 32))
        layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = x.unfold(2, 2, 2).unfold(3, 2, 2).reshape(len(x), 16, 4)
        return self.head(self.blocks(self.patch(patches) + self.positions).mean(1))


class Translator(nn.Module):
    "An encoder and a decoder with norms after each residual sum."

    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(32, 32), nn.Parameter(0.02 * torch.randn(10, 32))
        self.body = nn.Transformer(32, 2, 3, 3, 64, 0.0, batch_first=True, norm_first=False)
        self.head = nn.Linear(32, 32)

    def forward(self, tokens: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(10, 10, dtype=torch.bool).triu(1)
        source, target = self.embed(tokens) + self.positions, self.embed(written) + self.positions
        return self.head(self.body(source, target, tgt_mask=hidden))


class Recurrent(nn.Module):
    "An embedding, an LSTM and a head; or a plain recurrent net that adds."

    def __init__(self, kind: str = "lstm"):
        super().__init__()
        if kind == "lstm":
            self.embed, self.rnn = nn.Embedding(128, 32), nn.LSTM(32, 48, batch_first=True)
            self.head = nn.Linear(48, 128)
        else:
            self.embed, self.rnn = None, nn.RNN(2, 32, batch_first=True, nonlinearity=kind)
            self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is None:
            return self.head(self.rnn(x)[0][:, -1]).squeeze(-1)
        return self.head(self.rnn(self.embed(x))[0])


class Experts(nn.Module):
    "A linear router that sends each token to one of four small networks."

    def __init__(self, width: int = 32):
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        best, chosen = weights.max(-1)
        out = sum(expert(x) * (chosen == i)[..., None] for i, expert in enumerate(self.experts))
        self.shares = torch.stack([(chosen == i).float().mean() for i in range(4)])
        self.balance = 4 * (self.shares * weights.mean((0, 1))).sum()
        return x + best[..., None] * out


class MixtureModel(nn.Module):
    "A causal encoder layer and experts, twice."

    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(128, 32), nn.Parameter(0.02 * torch.randn(SEQ, 32))
        self.attn = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.moe = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(32, 128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, hidden = self.embed(tokens) + self.positions, torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
        for attn, moe in zip(self.attn, self.moe, strict=True):
            x = moe(attn(x, src_mask=hidden))
        return self.head(x)


class Denoiser(nn.Module):
    "Predicts the noise in a picture."

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(65, 96), nn.LayerNorm(96), nn.SiLU(), nn.Linear(96, 96), nn.LayerNorm(96), nn.SiLU()
        )
        self.head = nn.Linear(96, 64)

    def forward(self, x: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(torch.cat([x, share], 1)))


def _of_logits(model: nn.Module, logits: torch.Tensor, batch: dict, z: float, cap: float) -> torch.Tensor:
    "Cross-entropy of logits, with a cap and a z-loss where a cure adds them."
    logits = logits.float()
    logits = cap * torch.tanh(logits / cap) if cap else logits
    loss = F.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten())
    return loss + z * logits.logsumexp(-1).square().mean() if z else loss


def _language(model: nn.Module, batch: dict, z: float = 0.0, cap: float = 0.0) -> torch.Tensor:
    return _of_logits(model, model(batch["tokens"]), batch, z, cap)


def _mixture(model: nn.Module, batch: dict, z: float = 0.0, cap: float = 0.0) -> torch.Tensor:
    loss = _of_logits(model, model(batch["tokens"]), batch, z, cap)
    return loss + getattr(model, "balance", 0.01) * sum(m.balance for m in model.moe)


def _classes(model: nn.Module, batch: dict, z: float = 0.0, cap: float = 0.0) -> torch.Tensor:
    return _of_logits(model, model(batch["x"]), batch, z, cap)


def _translation(model: nn.Module, batch: dict, z: float = 0.0, cap: float = 0.0) -> torch.Tensor:
    return _of_logits(model, model(batch["tokens"], batch["written"]), batch, z, cap)


def _recurrent(model: nn.Module, batch: dict, z: float = 0.0, cap: float = 0.0) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]).float(), batch["targets"])


def _denoise(model: nn.Module, batch: dict, z: float = 0.0, cap: float = 0.0) -> torch.Tensor:
    return F.mse_loss(model(batch["x"], batch["share"]).float(), batch["targets"])


@dataclass(frozen=True)
class Arch:
    "How to build a model, its batches and its loss, and the rate at which it trains well."

    model: Callable  # (**options) -> nn.Module
    batch: Callable  # (generator) -> dict
    loss: Callable  # (model, batch, z, cap) -> scalar
    lr: float


def _gpt(**options) -> nn.Module:
    return LanguageModel(
        ModelConfig.plain(**{"vocab": 128, "seq": SEQ, "d_model": 32, "n_layer": 2, "n_head": 2} | options)
    )


ARCHS = {
    "gpt": Arch(_gpt, text_batch, _language, 3e-3),
    "vit": Arch(ViT, class_batch(1, 8, 8, noise=1.0), _classes, 3e-3),
    "translator": Arch(Translator, reversal_batch, _translation, 1e-3),
    "lstm": Arch(Recurrent, text_batch, _language, 5e-3),
    "rnn": Arch(lambda kind="relu": Recurrent(kind), adding_batch, _recurrent, 1e-3),
    "conv": Arch(ConvNet, class_batch(1, 8, 8, noise=1.5), _classes, 1e-3),
    "mlp": Arch(Classifier, class_batch(32, noise=1.5), _classes, 1e-3),
    "moe": Arch(MixtureModel, text_batch, _mixture, 3e-3),
    "diffusion": Arch(Denoiser, noise_batch, _denoise, 1e-3),
}  # fmt: skip
