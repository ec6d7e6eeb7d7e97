"Plain training programs as a stranger writes them, with the three lines of the Recorder."

HEAD = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from stabilitylab import Recorder
"""

# name -> source; each writes its record to "run" and takes some six steps
PROGRAMS = {}

PROGRAMS["criterion at module level, no main guard"] = (
    HEAD
    + """
torch.manual_seed(0)
x = torch.randn(64, 10)
y = (x[:, :3].sum(1, keepdim=True) + 0.1 * torch.randn(64, 1))
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)

model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

recorder = Recorder(model, optimizer, "run", snapshot_every=3)
with recorder:
    for epoch in range(2):
        for inputs, targets in loader:
            inputs, targets = recorder.batch((inputs, targets))
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()
            recorder.step(loss)
        scheduler.step()
"""
)

PROGRAMS["functions and argparse"] = (
    "import argparse\n"
    + HEAD
    + """

class Net(nn.Module):
    def __init__(self, hidden, drop):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.dropout1 = nn.Dropout(drop)
        self.fc1 = nn.Linear(4 * 9, hidden)
        self.fc2 = nn.Linear(hidden, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = torch.flatten(F.max_pool2d(x, 2), 1)
        x = self.dropout1(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def train(args, model, device, train_loader, optimizer, epoch, recorder):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        recorder.batch((data, target))
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        recorder.step(loss.item())
        if batch_idx % args.log_interval == 0:
            print(f"{epoch} {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=12)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--log-interval", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device("cpu")
    data = TensorDataset(torch.randn(40, 1, 8, 8), torch.randint(0, 10, (40,)))
    train_loader = DataLoader(data, batch_size=8)
    model = Net(args.hidden, drop=0.25).to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    with Recorder(model, optimizer, "run", snapshot_every=100) as recorder:
        for epoch in range(1, 3):
            train(args, model, device, train_loader, optimizer, epoch, recorder)
            scheduler.step()


if __name__ == "__main__":
    main()
"""
)

PROGRAMS["accumulation, autocast, clipping at module level"] = (
    HEAD
    + """
from contextlib import nullcontext
import math

batch_size, block_size, n_embd = 4, 8, 16
gradient_accumulation_steps = 3
grad_clip = 0.1
learning_rate, min_lr, warmup = 1e-2, 1e-3, 2
device_type = "cpu"
dtype = "bfloat16"
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
ctx = nullcontext() if dtype == "float32" else torch.amp.autocast(device_type=device_type, dtype=ptdtype)
torch.manual_seed(1337)
data = torch.randint(0, 50, (500,))

def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y

class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(50, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.mix = nn.Linear(n_embd, n_embd)
        self.lm_head = nn.Linear(n_embd, 50, bias=False)

    def forward(self, idx, targets=None):
        pos = torch.arange(idx.shape[1])
        h = torch.tanh(self.mix(self.wte(idx) + self.wpe(pos)))
        logits = self.lm_head(h)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss

def get_lr(it):
    if it < warmup:
        return learning_rate * (it + 1) / warmup
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * it / 10)) * (learning_rate - min_lr)

model = Bigram()
decay = [p for p in model.parameters() if p.dim() >= 2]
nodecay = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": nodecay, "weight_decay": 0.0}], lr=learning_rate
)
scaler = torch.amp.GradScaler(device_type, enabled=(dtype == "float16"))
X, Y = get_batch()
with Recorder(model, optimizer, "run", snapshot_every=50) as recorder:
    for iter_num in range(6):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        for micro_step in range(gradient_accumulation_steps):
            recorder.batch((X, Y))
            with ctx:
                logits, loss = model(X, Y)
                loss = loss / gradient_accumulation_steps
            X, Y = get_batch()
            scaler.scale(loss).backward()
        if grad_clip != 0.0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        recorder.step(loss.item() * gradient_accumulation_steps)
"""
)

PROGRAMS["a trainer class"] = (
    HEAD
    + """

class RandomDataset(Dataset):
    def __init__(self, size):
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, train_data, optimizer, device, save_every):
        self.device = device
        self.model = model.to(device)
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.loss_fn = torch.nn.SmoothL1Loss(beta=0.5)
        self.max_norm = 0.5

    def _run_batch(self, source, targets):
        source, targets = self.recorder.batch((source, targets))
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = self.loss_fn(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=self.max_norm)
        self.optimizer.step()
        self.recorder.step(loss)

    def _run_epoch(self, epoch):
        for source, targets in self.train_data:
            self._run_batch(source.to(self.device), targets.to(self.device))

    def train(self, max_epochs):
        with Recorder(self.model, self.optimizer, "run", snapshot_every=10) as self.recorder:
            for epoch in range(max_epochs):
                self._run_epoch(epoch)


def load_train_objs():
    train_set = RandomDataset(48)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)
    return train_set, model, optimizer


if __name__ == "__main__":
    torch.manual_seed(3)
    dataset, model, optimizer = load_train_objs()
    train_data = DataLoader(dataset, batch_size=16, shuffle=True)
    Trainer(model, train_data, optimizer, "cpu", 1).train(2)
"""
)

PROGRAMS["dict batches, class weights, accumulation by modulo, clipping by value"] = (
    HEAD
    + """

class Texts(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(0, 30, (7,), generator=g)
        return {"input_ids": ids, "label": ids[0] % 3, "length": 7}


class Classifier(nn.Module):
    def __init__(self, vocab, dim, classes, p=0.2):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, dim)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Dropout(p), nn.Linear(dim, classes))

    def forward(self, input_ids):
        return self.head(self.emb(input_ids))


ACCUM = 2

def main():
    torch.manual_seed(0)
    net = Classifier(30, 8, 3, p=0.3)
    opt = torch.optim.RMSprop(net.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=6)
    class_weights = torch.tensor([1.0, 2.0, 0.5])
    ce = nn.CrossEntropyLoss(weight=class_weights, label_smoothing=0.1)
    with Recorder(net, opt, "run", snapshot_every=4) as recorder:
        for i, batch in enumerate(DataLoader(Texts(), batch_size=5)):
            batch = recorder.batch(batch)
            logits = net(batch["input_ids"])
            loss = ce(logits, batch["label"]) / ACCUM
            loss.backward()
            if (i + 1) % ACCUM == 0:
                nn.utils.clip_grad_value_(net.parameters(), 0.02)
                opt.step()
                sched.step()
                opt.zero_grad()
                recorder.step(loss * ACCUM)


if __name__ == "__main__":
    main()
"""
)

PROGRAMS["a loss function of the script, summed, and noise in the loop"] = (
    HEAD
    + """
BETA = 0.7
hidden = 12

class VAE(nn.Module):
    def __init__(self):
        super(VAE, self).__init__()
        self.fc1 = nn.Linear(20, hidden)
        self.fc21 = nn.Linear(hidden, 4)
        self.fc22 = nn.Linear(hidden, 4)
        self.fc3 = nn.Linear(4, 20)

    def forward(self, x):
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc3(z)), mu, logvar

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(2)
model = VAE().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
recorder = Recorder(model, optimizer, "run", snapshot_every=10)

def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 20), reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + BETA * KLD

def train(epoch, loader):
    model.train()
    train_loss = 0
    for batch_idx, (data, _) in enumerate(loader):
        data = recorder.batch(data.to(device))
        noisy = (data + 0.05 * torch.randn_like(data)).clamp(0, 1)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(noisy)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        recorder.step(loss)

with recorder:
    loader = DataLoader(TensorDataset(torch.rand(40, 20), torch.zeros(40)), batch_size=8)
    for epoch in range(1, 3):
        train(epoch, loader)
"""
)

PROGRAMS["two parts of a loss, a config object, a closure, a scheduler a step, recorded on demand"] = (
    "import contextlib\nfrom dataclasses import dataclass, field\n"
    + HEAD
    + """

@dataclass
class Config:
    width: int = 16
    aux_weight: float = 0.3
    lr: float = 3e-3
    record: bool = True
    layers: list = field(default_factory=lambda: [16, 16])


class TwoHeads(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(w, w), nn.GELU()) for w in cfg.layers])
        self.a, self.b = nn.Linear(cfg.width, 1), nn.Linear(cfg.width, 4)

    def forward(self, x):
        h = self.body(x)
        return {"value": self.a(h).squeeze(-1), "logits": self.b(h)}


def main(cfg):
    torch.manual_seed(5)
    model = TwoHeads(cfg)
    optim = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95))
    sched = torch.optim.lr_scheduler.OneCycleLR(optim, max_lr=cfg.lr, total_steps=8)

    def compute_loss(out, value, label):
        main = F.huber_loss(out["value"], value)
        aux = F.cross_entropy(out["logits"], label)
        return main + cfg.aux_weight * aux, {"main": main.item()}

    rec = Recorder(model, optim, "run", snapshot_every=20) if cfg.record else contextlib.nullcontext()
    with rec:
        for step in range(6):
            x = torch.randn(8, cfg.width)
            batch = {"x": x, "value": x.sum(1), "label": x[:, :4].argmax(1)}
            if cfg.record:
                batch = rec.batch(batch)
            out = model(batch["x"])
            loss, logs = compute_loss(out, batch["value"], batch["label"])
            optim.zero_grad()
            loss.backward()
            total_norm = nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optim.step()
            sched.step()
            if cfg.record:
                rec.step(loss, total_norm=total_norm)


if __name__ == "__main__":
    main(Config())
"""
)

PROGRAMS["sequence to sequence with masks from helpers"] = (
    HEAD
    + """
PAD_IDX, BOS_IDX, VOCAB = 0, 1, 20


def causal_mask(size):
    return torch.triu(torch.full((size, size), float("-inf")), diagonal=1)


def create_mask(src, tgt):
    return causal_mask(tgt.shape[1]), (src == PAD_IDX), (tgt == PAD_IDX)


class Seq2Seq(nn.Module):
    def __init__(self, num_layers, emb_size, nhead, vocab, dropout=0.1):
        super(Seq2Seq, self).__init__()
        self.transformer = nn.Transformer(
            d_model=emb_size, nhead=nhead, num_encoder_layers=num_layers, num_decoder_layers=num_layers,
            dim_feedforward=32, dropout=dropout, batch_first=True,
        )
        self.generator = nn.Linear(emb_size, vocab)
        self.tok = nn.Embedding(vocab, emb_size)

    def forward(self, src, trg, tgt_mask, src_padding_mask, tgt_padding_mask):
        outs = self.transformer(
            self.tok(src), self.tok(trg), tgt_mask=tgt_mask,
            src_key_padding_mask=src_padding_mask, tgt_key_padding_mask=tgt_padding_mask.float() * -1e9,
        )
        return self.generator(outs)


def batches():
    for _ in range(5):
        src = torch.randint(2, VOCAB, (4, 6))
        src[0, -2:] = PAD_IDX
        yield src, torch.cat([torch.full((4, 1), BOS_IDX), src.flip(1)], 1)


torch.manual_seed(0)
transformer = Seq2Seq(1, 16, 2, VOCAB)
for p in transformer.parameters():
    if p.dim() > 1:
        nn.init.xavier_uniform_(p)
loss_fn = torch.nn.CrossEntropyLoss(ignore_index=PAD_IDX)
optimizer = torch.optim.Adam(transformer.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)


def train_epoch(model, optimizer):
    model.train()
    losses = 0
    with Recorder(model, optimizer, "run", snapshot_every=10) as recorder:
        for src, tgt in batches():
            src, tgt = recorder.batch([src, tgt])
            tgt_input = tgt[:, :-1]
            tgt_mask, src_padding_mask, tgt_padding_mask = create_mask(src, tgt_input)
            logits = model(src, tgt_input, tgt_mask, src_padding_mask, tgt_padding_mask)
            optimizer.zero_grad()
            tgt_out = tgt[:, 1:]
            loss = loss_fn(logits.reshape(-1, logits.shape[-1]), tgt_out.reshape(-1))
            loss.backward()
            optimizer.step()
            losses += loss.item()
            recorder.step(loss.item())
    return losses / 5


train_epoch(transformer, optimizer)
"""
)

PROGRAMS["accelerate with accumulation, bf16 and clipping"] = (
    HEAD
    + """
from accelerate import Accelerator


def make_model():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def training_function():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    torch.manual_seed(7)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(64, 6), torch.randint(0, 4, (64,)))
    loader = DataLoader(data, batch_size=8)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    with Recorder(model, optimizer, "run", snapshot_every=10) as recorder:
        for x, y in loader:
            x, y = recorder.batch((x, y))
            with accelerator.accumulate(model):
                outputs = model(x)
                loss = F.cross_entropy(outputs, y) * accelerator.num_processes
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                recorder.step(loss)


if __name__ == "__main__":
    training_function()
"""
)

PROGRAMS["a model of transformers in a plain loop"] = (
    HEAD
    + """
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

torch.manual_seed(0)
sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
config = BertConfig(vocab_size=40, num_labels=3, **sizes)
model = BertForSequenceClassification(config)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
lr_scheduler = get_linear_schedule_with_warmup(optimizer, 2, 6)
device = "cpu"
with Recorder(model, optimizer, "run", snapshot_every=10) as recorder:
    for step in range(6):
        batch = {
            "input_ids": torch.randint(0, 40, (4, 9)),
            "attention_mask": torch.ones(4, 9, dtype=torch.long),
            "labels": torch.randint(0, 3, (4,)),
        }
        batch = {k: v.to(device) for k, v in batch.items()}
        recorder.batch(batch)
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        recorder.step(loss)
"""
)

PROGRAMS["a factory, frozen parts, a replaced head, groups and an average of weights"] = (
    HEAD
    + """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Backbone(nn.Module):
    def __init__(self, channels, norm=nn.BatchNorm1d):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(9, channels), norm(channels), nn.ReLU())
        self.fc = nn.Linear(channels, 1000)

    def forward(self, x):
        return self.fc(self.stem(x))


def tiny(channels=8):
    return Backbone(channels)


NUM_CLASSES = 5
torch.manual_seed(0)
model = tiny(channels=6)
for param in model.parameters():
    param.requires_grad = False
num_ftrs = model.fc.in_features
model.fc = nn.Linear(num_ftrs, NUM_CLASSES)
for param in model.stem[1].parameters():
    param.requires_grad = True
optimizer = torch.optim.SGD(
    [{"params": model.fc.parameters(), "lr": 0.1}, {"params": model.stem[1].parameters(), "lr": 0.01}],
    momentum=0.9,
)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
criterion = nn.CrossEntropyLoss()
with Recorder(model, optimizer, "run", snapshot_every=10) as recorder:
    for step in range(5):
        inputs, labels = torch.randn(8, 9), torch.randint(0, NUM_CLASSES, (8,))
        recorder.batch((inputs, labels))
        optimizer.zero_grad()
        with torch.set_grad_enabled(True):
            outputs = model(inputs)
            _, preds = torch.max(outputs, 1)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
        ema.update_parameters(model)
        recorder.step(loss)
"""
)

PROGRAMS["a step in a function of its own, two optimizers"] = (
    HEAD
    + """

class Siamese(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.tower = nn.Linear(n_in, n_out)
        self.fc = nn.Linear(2 * n_out, 1)

    def forward(self, a, b):
        return torch.sigmoid(self.fc(torch.cat([self.tower(a), self.tower(b)], 1)))


def train_step(model, optimizers, criterion, a, b, y):
    for opt in optimizers:
        opt.zero_grad()
    pred = model(a, b).squeeze(1)
    loss = criterion(pred, y)
    loss.backward()
    for opt in optimizers:
        opt.step()
    return loss.detach()


def run():
    torch.manual_seed(11)
    model = Siamese(5, 7)
    optimizers = [
        torch.optim.SGD(model.tower.parameters(), lr=0.1, nesterov=True, momentum=0.8),
        torch.optim.Adam(model.fc.parameters(), lr=1e-2),
    ]
    criterion = nn.BCELoss()
    with Recorder(model, optimizers, "run", snapshot_every=10) as recorder:
        for _ in range(5):
            a, b = torch.randn(6, 5), torch.randn(6, 5)
            y = (a.sum(1) > b.sum(1)).float()
            a, b, y = recorder.batch((a, b, y))
            loss = train_step(model, optimizers, criterion, a, b, y)
            recorder.step(loss)


if __name__ == "__main__":
    run()
"""
)

PROGRAMS["a scaler and autocast, an argument per key"] = (
    HEAD
    + """

class Unet(nn.Module):
    def __init__(self, in_ch, base, depth=2):
        super().__init__()
        self.depth = depth
        self.inp = nn.Conv1d(in_ch, base, 3, padding=1)
        self.mid = nn.ModuleList(nn.Conv1d(base, base, 3, padding=1) for _ in range(depth))
        self.out = nn.Conv1d(base, in_ch, 1)
        self.time = nn.Linear(1, base)

    def forward(self, x, t):
        h = self.inp(x) + self.time(t[:, None].float())[:, :, None]
        for layer in self.mid:
            h = h + F.silu(layer(h))
        return self.out(h)


T = 50
betas = torch.linspace(1e-4, 0.02, T)
alphas_bar = torch.cumprod(1 - betas, 0)


def q_sample(x0, t, noise):
    a = alphas_bar[t][:, None, None]
    return a.sqrt() * x0 + (1 - a).sqrt() * noise


if __name__ == "__main__":
    torch.manual_seed(9)
    model = Unet(in_ch=2, base=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with Recorder(model, optimizer, "run", snapshot_every=10, scaler=scaler) as recorder:
        for step in range(6):
            x0 = recorder.batch(torch.randn(4, 2, 8))
            t = torch.randint(0, T, (x0.shape[0],))
            noise = torch.randn_like(x0)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
                pred = model(q_sample(x0, t, noise), t=t)
                loss = F.mse_loss(pred.float(), noise)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            recorder.step(loss)
"""
)

PROGRAMS["the Trainer with bf16, accumulation and clipping"] = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from stabilitylab.probe.hf import RecorderCallback

torch.manual_seed(0)
config = GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2)
model = GPT2LMHeadModel(config)
rows = [torch.randint(0, 40, (12,)) for _ in range(64)]
data = [{"input_ids": row, "labels": row} for row in rows]
args = TrainingArguments(
    "out", max_steps=5, per_device_train_batch_size=4, gradient_accumulation_steps=2, bf16=True,
    use_cpu=True, report_to=[], save_strategy="no", max_grad_norm=0.2, learning_rate=1e-3, logging_steps=1,
)
trainer = Trainer(model, args, train_dataset=data, callbacks=[RecorderCallback("run", snapshot_every=10)])
trainer.train()
"""

PROGRAMS["batches of a class of one's own, a constant of the module in the forward pass"] = (
    "from typing import NamedTuple\n"
    + HEAD
    + """
SCALE = 3.0


class Item(NamedTuple):
    points: torch.Tensor
    value: torch.Tensor


class PointNet(nn.Module):
    def __init__(self, sizes=(3, 8, 8), **extra):
        super().__init__()
        self.mlp = nn.Sequential(*[nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])])
        self.out = nn.Linear(sizes[-1], 1)

    def forward(self, item):
        return self.out(SCALE * self.mlp(item.points).amax(1))[:, 0]


def log_cosh(pred, true):
    return torch.log(torch.cosh(pred - true)).mean()


def fit(epochs=1, lr=2e-2):
    torch.manual_seed(4)
    model = PointNet((3, 10, 6))
    opt = torch.optim.NAdam(model.parameters(), lr=lr)
    with Recorder(model, opt, "run", snapshot_every=3) as recorder:
        for epoch in range(epochs):
            for i in range(5):
                points = torch.randn(4, 7, 3)
                item = recorder.batch(Item(points, points.norm(dim=-1).amax(1)))
                loss = log_cosh(model(item), item.value)
                l2 = sum(p.pow(2).sum() for p in model.parameters())
                opt.zero_grad()
                (loss + 1e-3 * l2).backward()
                opt.step()
                recorder.step(loss + 1e-3 * l2)


fit()
"""
)

PROGRAMS["a model chosen by a setting, a batch named like a builtin"] = (
    "import argparse\nfrom dataclasses import dataclass\n"
    + HEAD
    + """
@dataclass
class Sizes:
    n_in: int = 6
    width: int = 8

class Bow(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.out = nn.Linear(config.n_in, 1)

    def forward(self, x, hidden):
        return self.out(x), hidden

class Cell(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.mix = nn.Linear(config.n_in, config.width)
        self.out = nn.Linear(config.width, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.mix(x)))

def sample():
    return torch.zeros(1, config.n_in)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--type", default="cell")
    parser.add_argument("--clip", type=float, default=0.5)
    args = parser.parse_args()
    torch.manual_seed(5)
    config = Sizes(width=12)
    if args.type == "bow":
        model = Bow(config)
    elif args.type == "cell":
        model = Cell(config)
    else:
        raise ValueError(args.type)
    model.to("cpu")
    criterion = nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Recorder(model, optimizer, "run", snapshot_every=3) as recorder:
        for step in range(6):
            input, target = torch.randn(4, 6), torch.randn(4, 1)
            recorder.batch((input, target))
            optimizer.zero_grad()
            if args.type == "bow":
                hidden = repackage(hidden)
                output, hidden = model(input, hidden)
            else:
                output = model(input)
            loss = criterion(output, target)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            recorder.step(loss)
"""
)

PROGRAMS["a Trainer with a loss and a reference model of its own, and accumulation"] = """
import copy
import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from stabilitylab.probe.hf import RecorderCallback


class Preference(Trainer):
    def __init__(self, *args, beta=0.1, **kwargs):
        super().__init__(*args, **kwargs)
        self.beta, self.margins = beta, []
        self.ref_model = copy.deepcopy(self.model).eval().requires_grad_(False)

    def score(self, model, inputs):
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
        return -F.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten())

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with torch.no_grad():
            reference = self.score(self.ref_model, inputs)
        margin = self.score(model, inputs) - reference
        self.margins.append(margin.item())
        return F.softplus(-self.beta * margin) + 0.0 * self.args.weight_decay


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2))
rows = [torch.randint(0, 40, (12,)) for _ in range(64)]
data = [{"input_ids": row, "labels": row} for row in rows]
args = TrainingArguments(
    "out", max_steps=5, per_device_train_batch_size=4, gradient_accumulation_steps=2, use_cpu=True,
    report_to=[], save_strategy="no", learning_rate=1e-2, logging_steps=1,
)
if __name__ == "__main__":
    recorded = RecorderCallback("run", snapshot_every=3)
    trainer = Preference(model, args, train_dataset=data, beta=0.5, callbacks=[recorded])
    trainer.train()
"""

PROGRAMS["the Trainer with label smoothing"] = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from stabilitylab.probe.hf import RecorderCallback

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2))
rows = [torch.randint(0, 40, (12,)) for _ in range(64)]
data = [{"input_ids": row, "labels": row} for row in rows]
args = TrainingArguments(
    "out", max_steps=5, per_device_train_batch_size=4, label_smoothing_factor=0.1, use_cpu=True,
    report_to=[], save_strategy="no", learning_rate=1e-2, logging_steps=1,
)
trainer = Trainer(model, args, train_dataset=data, callbacks=[RecorderCallback("run", snapshot_every=3)])
trainer.train()
"""


PROGRAMS["a hidden state and a counter that go on from batch to batch"] = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.width = width
        self.embed = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, x, state):
        h, state = self.lstm(self.embed(x), state)
        return self.head(h).flatten(0, 1), state


def detach(states):
    return [state.detach() for state in states]


torch.manual_seed(0)
ids = torch.randint(0, 20, (4, 61))
model = Net(20, 8)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
with Recorder(model, optimizer, "run", snapshot_every=4) as recorder:
    states = (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))
    for i in range(0, 60, 10):
        inputs, targets = recorder.batch((ids[:, i : i + 10], ids[:, i + 1 : i + 11]))
        states = detach(states)
        outputs, states = model(inputs, states)
        loss = criterion(outputs, targets.reshape(-1)) * (1 + i / 60)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recorder.step(loss)
"""
)

PROGRAMS["a second network, and two backward passes for one step"] = (
    HEAD
    + """
class Part(nn.Module):
    def __init__(self, wide, out):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(wide, 8), nn.LeakyReLU(0.2), nn.Linear(8, out))

    def forward(self, x):
        return self.body(x)


torch.manual_seed(0)
maker, judge = Part(3, 5), Part(5, 1)
criterion = nn.BCEWithLogitsLoss()
opt_judge = torch.optim.Adam(judge.parameters(), lr=0.01)
opt_maker = torch.optim.Adam(maker.parameters(), lr=0.01)
with Recorder(judge, opt_judge, "run", snapshot_every=100) as recorder:
    for step in range(6):
        real = recorder.batch(torch.randn(6, 5) + 1)
        judge.zero_grad()
        label = torch.full((6, 1), 1.0)
        loss_real = criterion(judge(real), label)
        loss_real.backward()
        fake = maker(torch.randn(6, 3))
        label.fill_(0.0)
        loss_fake = criterion(judge(fake.detach()), label)
        loss_fake.backward()
        opt_judge.step()
        recorder.step(loss_real + loss_fake)
        maker.zero_grad()
        label.fill_(1.0)
        criterion(judge(fake), label).backward()
        opt_maker.step()
"""
)

PROGRAMS["the optimizer of the second loss, a loss read from the model, results as attributes"] = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width, self.last_loss = width, None
        self.layers = nn.Sequential(nn.Linear(6, width), nn.Dropout(0.2), nn.Linear(width, 3))

    def forward(self, x, y):
        out = self.layers(x)
        self.last_loss = F.cross_entropy(out, y)
        return out


class Loop:
    def __init__(self):
        self.other, self.model = nn.Linear(6, 6), Net(10)
        self.other_optimizer = torch.optim.SGD(self.other.parameters(), lr=0.1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def run(self):
        with Recorder(self.model, self.optimizer, "run", snapshot_every=100) as recorder:
            for step in range(5):
                x, y = recorder.batch((torch.randn(8, 6), torch.randint(0, 3, (8,))))
                self.near = self.other(x)
                self.other_optimizer.zero_grad()
                (self.near - x).square().mean().backward()
                self.other_optimizer.step()
                logits = self.model(self.near.detach(), y)
                self.loss = self.model.last_loss
                self.optimizer.zero_grad()
                self.loss.backward()
                self.optimizer.step()
                recorder.step(self.loss)


torch.manual_seed(0)
Loop().run()
"""
)

PROGRAMS["a memory that a method begins anew, inner loops, an earlier pass that draws"] = (
    HEAD
    + """

class Memory(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.cell = nn.GRUCell(4, width)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(width, 2)

    def begin(self, rows):
        self.state = torch.zeros(rows, self.width)

    def forward(self, x=None):
        x = torch.zeros(len(self.state), 4) if x is None else x
        self.state = self.cell(self.drop(x), self.state)
        return self.out(self.state)


torch.manual_seed(0)
model, criterion = Memory(6), nn.MSELoss()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
with Recorder(model, optimizer, "run", snapshot_every=3) as recorder:
    for number in range(6):
        x, y = recorder.batch((torch.randn(5, 8, 4), torch.randn(3, 8, 2)))
        optimizer.zero_grad()
        model.begin(8)
        first = criterion(model(torch.randn(8, 4)), torch.zeros(8, 2))
        model.begin(x.size(1))
        for i in range(x.size(0)):
            model(x[i])
        answers = torch.zeros(y.size())
        for i in range(y.size(0)):
            answers[i] = model()
        loss = criterion(answers, y)
        loss.backward()
        optimizer.step()
        recorder.step(loss)
"""
)

PROGRAMS["a class that trains, a model that keeps nothing of its settings, parameters clipped as a list"] = (
    "import argparse\n"
    + HEAD
    + """

class Model(nn.Module):
    def __init__(self, configs):
        super().__init__()
        self.inner = nn.Linear(configs.width, configs.hidden)
        self.drop = nn.Dropout(configs.dropout)
        self.outer = nn.Linear(configs.hidden, 2)

    def forward(self, x):
        return self.outer(self.drop(torch.tanh(self.inner(x))))


class Experiment:
    def __init__(self, args):
        self.args = args
        self.model = self._build()

    def _build(self):
        return {"Model": Model}[self.args.kind](self.args).float()

    def _predict(self, x, y):
        return self.model(x * self.args.scale), y[:, : self.args.columns]

    def train(self):
        optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        criterion = nn.MSELoss()
        params = list(self.model.parameters())
        with Recorder(self.model, optimizer, "run", snapshot_every=3) as recorder:
            for number in range(6):
                x, y = recorder.batch((torch.randn(8, 5), torch.randn(8, 3)))
                optimizer.zero_grad()
                outputs, y = self._predict(x, y)
                loss = criterion(outputs, y)
                loss.backward()
                nn.utils.clip_grad_norm_(params, 0.1)
                optimizer.step()
                recorder.step(loss)


if __name__ == "__main__":
    torch.manual_seed(0)
    parser = argparse.ArgumentParser()
    for name, value in {"width": 5, "hidden": 7, "columns": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in {"dropout": 0.2, "scale": 1.5}.items():
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--kind", default="Model")
    Experiment(parser.parse_args()).train()
"""
)

PROGRAMS["a batch spread over the arguments of a step, numbers from a file by its relative path"] = (
    "from pathlib import Path\n"
    + HEAD
    + """
class Net(nn.Module):
    def __init__(self, file):
        super().__init__()
        self.register_buffer("scale", torch.tensor(float(Path(file).read_text())))
        self.file, self.inner = file, nn.Linear(6, 3)

    def forward(self, x):
        return self.scale * self.inner(x)


def data():
    return torch.randn(8, 6), torch.randint(3, (8,))


def train(x, y, recorder, weight=None):
    optimizer.zero_grad()
    loss = 0
    for at in range(4):
        output = net(x[at:at + 1])
        loss += criterion(output, y[at:at + 1])
    loss.backward()
    optimizer.step()
    recorder.step(loss)


if __name__ == "__main__":
    torch.manual_seed(0)
    Path("data").mkdir()
    Path("data/scale.txt").write_text("1.5")
    net, criterion = Net("data/scale.txt"), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    with Recorder(net, optimizer, "run", snapshot_every=3) as recorder:
        for number in range(6):
            train(*recorder.batch(data()), recorder)
"""
)

PROGRAMS["a counter that chooses the masks, a state that begins as None, clipping before the gradient"] = (
    HEAD
    + """
class Masked(nn.Module):
    def __init__(self, n_masks):
        super().__init__()
        self.n_masks, self.seed = n_masks, 0
        self.cell, self.out = nn.RNN(4, 6, batch_first=True), nn.Linear(6, 2)
        self.register_buffer("mask", torch.ones(6))

    def update_masks(self):
        rng = torch.Generator().manual_seed(self.seed)
        self.seed = (self.seed + 1) % self.n_masks
        self.mask.copy_((torch.rand(6, generator=rng) > 0.4).float())

    def forward(self, x, state):
        out, state = self.cell(x, state)
        return self.out(out[:, -1] * self.mask), state


torch.manual_seed(0)
model, criterion = Masked(5), nn.MSELoss()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
state = None
with Recorder(model, optimizer, "run", snapshot_every=3) as recorder:
    for number in range(8):
        x, y = recorder.batch((torch.randn(5, 3, 4), torch.randn(5, 2)))
        optimizer.zero_grad()
        model.update_masks()
        predictions, state = model(x, state)
        state = state.detach()
        loss = criterion(predictions, y)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        loss.backward()
        optimizer.step()
        recorder.step(loss)
"""
)

PROGRAMS[
    "slices that the loop takes itself, a list that is reversed, a criterion that computes what it keeps"
] = (
    HEAD
    + """

class Split(nn.Module):
    def __init__(self, splits, scale):
        super().__init__()
        self.splits = [0] + splits
        self.scale = scale

    def forward(self, x, y, weights):
        parts = [(x - y)[a:].pow(2).mean() for a in self.splits]
        return self.scale * sum(w * part for w, part in zip(weights, parts)) / len(parts)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
criterion = None
if not criterion:
    splits = [1]
    criterion = Split(splits, 0.5)
optimizer, size = torch.optim.Adam(model.parameters(), lr=1e-2), 4
with Recorder(model, optimizer, "run", snapshot_every=3) as recorder:
    for number in range(8):
        x, y = torch.randn(12, 10), torch.randn(12, 1)
        recorder.batch((x, y))
        optimizer.zero_grad()
        weights = []
        for w in (1.0, 3.0):
            weights.append(w)
        weights.reverse()
        if size > 0:
            for i in range(0, len(x), size):
                loss = criterion(model(x[i : i + size]), y[i : i + size], weights) / (len(x) / size)
                loss.backward()
        else:
            loss = criterion(model(x), y, weights)
            loss.backward()
        optimizer.step()
        recorder.step(loss)
"""
)

PROGRAMS["a critic whose passes begin with gradients of their own"] = (
    HEAD
    + """
torch.manual_seed(0)
netD = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
netG = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
optimizerD = torch.optim.RMSprop(netD.parameters(), lr=5e-3)
optimizerG = torch.optim.RMSprop(netG.parameters(), lr=5e-3)
one = torch.tensor(1, dtype=torch.float)
mone = one * -1
with Recorder(netD, optimizerD, "run", snapshot_every=3) as recorder:
    for i in range(8):
        real = torch.randn(16, 2) + 2
        for p in netD.parameters():
            p.requires_grad = True
        netD.zero_grad()
        errD_real = netD(recorder.batch(real)).mean()
        errD_real.backward(one)
        noise = torch.randn(16, 3)
        with torch.no_grad():
            fake = netG(noise)
        errD_fake = netD(fake).mean()
        errD_fake.backward(mone)
        errD = errD_real - errD_fake
        optimizerD.step()
        recorder.step(errD)
        for p in netD.parameters():
            p.requires_grad = False
        netG.zero_grad()
        errG = netD(netG(torch.randn(16, 3))).mean()
        errG.backward(one)
        optimizerG.step()
"""
)

PROGRAMS["a criterion that holds the model"] = (
    HEAD
    + """
class Encoder(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embedding = nn.EmbeddingBag(30, width)

    def forward(self, ids):
        return F.normalize(self.embedding(ids), dim=-1)


class RankingLoss(nn.Module):
    def __init__(self, model, scale=20.0, base=None):
        super().__init__()
        self.net = model
        self.scale = scale
        self.base = base or nn.CrossEntropyLoss()

    def forward(self, features, labels=None):
        a, b = [self.net(ids) for ids in features]
        scores = self.scale * a @ b.T
        return self.base(scores, torch.arange(len(scores)))


torch.manual_seed(0)
model = Encoder()
criterion = RankingLoss(model, scale=10.0, base=nn.CrossEntropyLoss(label_smoothing=0.1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
with Recorder(model, optimizer, "run", snapshot_every=3) as recorder:
    for _ in range(6):
        features = [torch.randint(0, 30, (8, 5)), torch.randint(0, 30, (8, 5))]
        optimizer.zero_grad()
        loss = criterion(recorder.batch(features))
        loss.backward()
        optimizer.step()
        recorder.step(loss)
"""
)

PROGRAMS["batches of graphs of PyTorch Geometric"] = """
import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool
from stabilitylab import Recorder


class GCN(torch.nn.Module):
    def __init__(self, channels, hidden, classes):
        super().__init__()
        self.conv = GCNConv(channels, hidden)
        self.head = torch.nn.Linear(hidden, classes)

    def forward(self, x, edge_index, batch):
        x = F.dropout(self.conv(x, edge_index).relu(), p=0.2, training=self.training)
        return self.head(global_mean_pool(x, batch))


def graph():
    n = int(torch.randint(5, 12, ()))
    return Data(x=torch.randn(n, 6), edge_index=torch.randint(0, n, (2, 3 * n)), y=torch.randint(0, 3, (1,)))


def main():
    torch.manual_seed(0)
    loader = DataLoader([graph() for _ in range(32)], batch_size=8, shuffle=True)
    model = GCN(6, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Recorder(model, optimizer, "run", snapshot_every=3) as recorder:
        for epoch in range(2):
            for data in loader:
                data = recorder.batch(data)
                out = model(data.x, data.edge_index, data.batch)
                loss = F.cross_entropy(out, data.y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                recorder.step(loss)


if __name__ == "__main__":
    main()
"""
