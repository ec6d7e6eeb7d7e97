"Drawn pictures with captions, and a frozen language model and picture encoder joined by new gated layers"

from functools import cache

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from stabilitylab.models.attention import Attention
from stabilitylab.models.decoder import Block, LanguageModel, next_token_loss
from stabilitylab.models.parts import ModelConfig, WithMLP, init_weights, make_norm
from stabilitylab.models.tasks import Task
from stabilitylab.names.errors import bad_input

SHAPES, COLOUR_WORDS, _SIDES = ("square", "disc", "cross"), ("red", "green", "blue"), ("left", "right")
CAPTION_WORDS = ("<pad>", "<start>", "<end>", "a", "on", "the", *COLOUR_WORDS, *SHAPES, *_SIDES)


def draw(
    shape: str,  # name of the shape, one of `SHAPES`
    colour: str,  # name of the colour, one of `COLOUR_WORDS`
    column: int,  # column of the centre, 4 to 11
    row: int,  # row of the centre, 4 to 11
    size: int = 16,  # pixels on a side
) -> np.ndarray:  # (3, size, size) float32 in [0, 1]
    "A coloured shape on black."
    y, x = np.mgrid[:size, :size]
    across, down = np.abs(x - column), np.abs(y - row)
    masks = {
        "square": np.maximum(across, down) <= 3,
        "disc": across**2 + down**2 <= 10,
        "cross": (np.minimum(across, down) <= 0) & (np.maximum(across, down) <= 4),
    }
    picture = np.zeros((3, size, size), np.float32)
    picture[COLOUR_WORDS.index(colour)] = masks[shape]
    return picture


def picture_task(
    batch: int = 32,  # pictures per step
    noise: float = 0.1,  # standard deviation of the noise on each pixel, >= 0
    seed: int = 0,  # seed of all random draws
) -> Task:  # pictures (batch, 3, 16, 16), captions of 6 words and their end, `label` in 0..8
    "Caption a picture."

    def make(rng: np.random.Generator, rows: int) -> dict:  # rows: of the batch
        "Pictures and their words."
        shape, colour = rng.integers(0, 3, (2, rows))
        column, row = rng.integers(4, 12, (2, rows))
        drawn = [
            draw(SHAPES[s], COLOUR_WORDS[c], x, y)
            for s, c, x, y in zip(shape, colour, column, row, strict=True)
        ]
        pictures = np.stack(drawn) + noise * rng.standard_normal((rows, 3, 16, 16))
        words = [caption(s, c, x) for s, c, x in zip(shape, colour, column, strict=True)]
        tokens = torch.tensor(words)
        text = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].clone()}
        return {"pictures": torch.from_numpy(pictures.astype(np.float32)), **text}

    return Task("pictures", len(CAPTION_WORDS), 7, make, batch, seed)


def caption(
    shape: int,  # index into `SHAPES`
    colour: int,  # index into `COLOUR_WORDS`
    column: int,  # column of the centre; left below 8
) -> list[int]:  # tokens: <start> a COLOUR SHAPE on the SIDE <end>
    "The sentence that describes a picture, as tokens."
    side = _SIDES[int(column >= 8)]
    words = ["<start>", "a", COLOUR_WORDS[colour], SHAPES[shape], "on", "the", side, "<end>"]
    return [CAPTION_WORDS.index(word) for word in words]


class PictureEncoder(nn.Module):
    "A small vision transformer."

    def __init__(
        self,
        config: ModelConfig,  # shape and switches; positions are learned
    ):
        super().__init__()
        self.patches = nn.Conv2d(3, config.d_model, 4, stride=4)
        self.pos_embed = nn.Embedding(16, config.d_model)
        self.blocks = nn.ModuleList(Block(config, causal=False, positions="none") for _ in range(2))
        self.norm = make_norm(config.norm, config.d_model, config.bias)
        self.classifier = nn.Linear(config.d_model, len(SHAPES) * len(COLOUR_WORDS))
        init_weights(self, config)

    def forward(
        self,
        pictures: torch.Tensor,  # (batch, 3, 16, 16)
    ) -> torch.Tensor:  # (batch, 16, d_model)
        "One vector per patch."
        x = self.patches(pictures).flatten(2).transpose(1, 2) + self.pos_embed.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class GatedBlock(WithMLP):
    "New layers between the frozen ones: attention to the picture and an MLP, each times tanh of a gate."

    def __init__(
        self,
        config: ModelConfig,  # shape and switches of the new layers
        start: float = 0.0,  # of both gates; 0: the frozen model is unchanged at first
    ):
        super().__init__()
        self.norm1 = make_norm(config.norm, config.d_model, config.bias)
        self.cross_attn = Attention(config, causal=False, positions="none")
        self.norm2 = make_norm(config.norm, config.d_model, config.bias)
        self.add_mlp(config)
        self.attn_gate = nn.Parameter(torch.full((), float(start)))
        self.mlp_gate = nn.Parameter(torch.full((), float(start)))

    def forward(
        self,
        x: torch.Tensor,  # (batch, seq, d_model)
        memory: torch.Tensor,  # (batch, 16, d_model) of the picture
    ) -> torch.Tensor:  # (batch, seq, d_model)
        "The residual stream with what the picture adds."
        x = x + torch.tanh(self.attn_gate) * self.cross_attn(self.norm1(x), memory)
        return x + torch.tanh(self.mlp_gate) * self.mlp(self.norm2(x))


@cache
def pretrained_parts(
    d_model: int = 32,  # width of both parts
    steps: int = 60,  # training steps of each part, >= 0
    seed: int = 0,  # seed of weights and data
) -> tuple[dict, dict]:  # state dicts of a `LanguageModel` and a `PictureEncoder`; do not change them
    "Weights of a language model of captions and of a picture encoder, trained briefly."
    task = picture_task(seed=seed + 1)
    # cached, so that a second call draws nothing: the caller's random state must not tell the two apart
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text, eyes = LanguageModel(part_config(d_model)), PictureEncoder(part_config(d_model))
        _train(text, lambda batch: text(batch["tokens"], batch["targets"]), task, steps)
        _train(eyes, lambda batch: _naming_loss(eyes, batch), task, steps)
    return text.state_dict(), eyes.state_dict()


def part_config(
    d_model: int = 32,  # width
) -> ModelConfig:  # of the frozen parts
    "The shape of the frozen parts."
    return ModelConfig(vocab=len(CAPTION_WORDS), seq=8, d_model=d_model, n_layer=2, n_head=4)


def _naming_loss(eyes: PictureEncoder, batch: dict) -> torch.Tensor:
    "Cross-entropy of colour and shape."
    colour, shape = batch["targets"][:, 1] - CAPTION_WORDS.index("red"), batch["targets"][:, 2]
    label = colour * len(SHAPES) + shape - CAPTION_WORDS.index("square")
    return F.cross_entropy(eyes.classifier(eyes(batch["pictures"]).mean(dim=1)), label)


def _train(model: nn.Module, loss, task, steps: int) -> None:
    "A few steps of Adam."
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss(task.at(step)).backward()
        optimizer.step()


class VisionLanguageModel(nn.Module):
    "A frozen language model and picture encoder with new gated layers between them."

    def __init__(
        self,
        config: ModelConfig
        | None = None,  # switches of the new layers; its width is that of the parts; None: the parts' own
        gate: float = 0.0,  # initial value of the gates
        pretrain_steps: int = 60,  # training steps of each part
        seed: int = 0,  # seed of the parts' weights and data
        pretrained_first: bool = False,  # a pre-trained layer follows the embedding, not a new one
    ):
        super().__init__()
        config = config or part_config()
        self.pretrained_first = pretrained_first
        if config.vocab != len(CAPTION_WORDS):
            raise bad_input("vocab", config.vocab, f"{len(CAPTION_WORDS)}, the words of the captions")
        self.config, parts = config, part_config(config.d_model)
        text, eyes = pretrained_parts(config.d_model, pretrain_steps, seed)
        self.language, self.eyes = LanguageModel(parts), PictureEncoder(parts)
        self.language.load_state_dict(text)
        self.eyes.load_state_dict(eyes)
        self.requires_grad_(False)
        self.new = nn.ModuleList(GatedBlock(config, gate) for _ in self.language.blocks)
        init_weights(self.new, config)

    def forward(
        self,
        pictures: torch.Tensor,  # (batch, 3, 16, 16)
        tokens: torch.Tensor,  # (batch, seq) int64
        targets: torch.Tensor | None = None,  # same shape; -100 does not count
    ) -> torch.Tensor:  # logits (batch, seq, vocab), or with targets the mean loss in nats
        "The logits of the next word of a caption, or their mean cross-entropy."
        memory, x = self.eyes(pictures), self.language.embedded(tokens)
        for new, block in zip(self.new, self.language.blocks, strict=True):
            x = new(block(x), memory) if self.pretrained_first else block(new(x, memory))
        return next_token_loss(self.language.lm_head(self.language.norm(x)), targets)
