"""Conformance of every fix: preview and undo leave no trace, promises of an unchanged function hold,
nothing that is not finite reaches a weight, states survive a resume, 16-bit weights work, ranks agree."""

import copy
import math

import pytest
import torch
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from reproductions.vision import VisionLanguageModel
from stabilitylab.fixes.registry import Fix, answers, apply_all, conflicts, fix, fixes, parameter_ranges
from stabilitylab.fixes.submodules import embedding_tables, output_layer
from stabilitylab.fixes.training import Training
from stabilitylab.knowledge.remedies import load_rows
from stabilitylab.models.decoder import LanguageModel
from stabilitylab.models.parts import ModelConfig
from stabilitylab.models.tasks import copy_task, model_loss
from stabilitylab.names.errors import InputError

NAMES = fixes().name.tolist()
TABLE = fixes().set_index("name")
FROZEN = {"unfreeze_norms", "unfreeze"}  # act on a model with frozen parts
SMALL = {  # parameters that show within a few steps
    "rollback": {"depth": 1},
    "rollback_lower_lr": {"depth": 1},
    "rollback_skip": {"depth": 1, "count": 3},
    "warmup": {"steps": 4},
    "curriculum": {"steps": 4},
    "zclip": {"warmup": 2},
    "adagc": {"warmup": 1},
    "skip_sigma": {"least": 2, "window": 8},
    "update_filter": {"window": 4},
    "lora": {"rank": 2},
    "qk_clip": {"limit": 1.0},
    "shuffle": {"block": 4},
}


def make(name):
    "The fix with parameters that show quickly."
    return fix(name, **SMALL.get(name, {}))


def training_for(name, dtype=torch.float32, steps=2):
    "A tiny training on which the fix has something to change, a few steps old and with kept states."
    torch.manual_seed(0)
    if name in FROZEN:
        model = VisionLanguageModel(pretrain_steps=0)
        pictures = torch.randn(2, 3, 16, 16)
        tokens = torch.randint(3, 13, (2, 7))
        batch = {"pictures": pictures, "tokens": tokens, "targets": tokens}
        batches = lambda step: [batch]  # noqa: E731
    else:
        shape = dict(vocab=16, d_model=16, n_layer=2, n_head=2, seq=16, bias=True, dropout=0.1)
        shape |= {"norm_place": "post"} if name == "deepnorm" else {}
        model = LanguageModel(ModelConfig(**shape, embed_scale=True, init_std=0.1))
        task = copy_task(length=5, vocab=16, batch=4)
        batches = lambda step: [task.at(2 * step), task.at(2 * step + 1)]  # noqa: E731
    model.to(dtype)
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.01, eps=1e-7)
    training = Training(model, optimizer, model_loss, batches)
    training.keep()
    for _ in range(steps):
        training.run_step()
    return training


def photograph(training):
    "Everything that a fix may touch: values, and which objects stand where."
    model, optimizer = training.model, training.optimizer
    hooks = {
        name: [len(getattr(m, kind)) for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")]
        for name, m in model.named_modules()
    }
    return {
        "values": {n: t.detach().clone() for n, t in model.state_dict().items()},
        "tensors": [(n, id(p), p.requires_grad, p.dtype) for n, p in model.named_parameters()],
        "modules": [(n, id(m), type(m), m.training) for n, m in model.named_modules()],
        "hooks": hooks,
        "extra": {n: getattr(m, "p", None) for n, m in model.named_modules()},
        "optimizer": id(optimizer),
        "groups": [
            ({k: v for k, v in g.items() if k != "params"}, [id(p) for p in g["params"]])
            for g in optimizer.param_groups
        ],
        "moments": {
            id(p): {k: v.clone() if torch.is_tensor(v) else v for k, v in s.items()}
            for p, s in optimizer.state.items()
        },
        "training": {
            k: getattr(training, k)
            for k in (
                "loss",
                "batches",
                "schedule",
                "clip",
                "autocast",
                "microbatch_weights",
                "step",
                "seed",
                "measure",
            )
        },
        "standing": (list(training.hooks), list(training.applied), sorted(training.states)),
        "rng": torch.get_rng_state(),
    }


def same(a, b):
    "Equality to the last bit, NaN included."
    if torch.is_tensor(a):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.view(-1).nan_to_num(7.5), b.view(-1).nan_to_num(7.5))
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or a is b


def assert_same(before, after):
    "Names the part that differs."
    for part in before:
        assert same(before[part], after[part]), part


def outputs(training, batch=None):
    "The model's logits on fixed tokens, without dropout."
    batch = training.batches(0)[0] if batch is None else batch
    inputs = {k: v for k, v in batch.items() if k != "targets"}
    training.model.eval()
    with torch.no_grad():
        out = training.model(**inputs)
    training.model.train()
    return out


def test_the_list_is_whole():
    assert len(NAMES) >= 60 and "placebo" in NAMES
    assert set(TABLE.acts_on) == {
        "model",
        "optimizer",
        "loss",
        "schedule",
        "data",
        "precision",
        "init",
        "restart",
    }
    for name in NAMES:
        one = fix(name)
        assert isinstance(one, Fix) and one.about.source and TABLE.what[name].endswith("."), name
        assert len(one.reports()) == len(one.about.rows) > 0, name


def test_every_row_of_the_accounts_has_an_answer():
    rows = answers()
    assert (rows.answer != "none").all() and (rows[rows.answer != "missing"].text.str.len() > 2).all()
    assert set(rows.id) == {r["id"] for t in ("phenomena", "remedies") for r in load_rows(t)}
    objects = rows[rows.answer == "object"]
    assert all(set(text.split(", ")) <= set(NAMES) for text in objects.text)
    done = objects.id.isin({r["id"] for r in load_rows("remedies") if r["what"] == "remedy"}).sum()
    assert done >= 75


@pytest.mark.slow
def test_preview_and_undo_leave_no_trace(subtests):
    for name in NAMES:
        with subtests.test(name=name):
            training = training_for(name)
            before = photograph(training)
            table = make(name).preview(training)
            assert list(table.columns) == ["part", "what", "before", "after"] and len(table)
            assert_same(before, photograph(training))
            book = make(name).apply(training)
            assert training.applied == [book]
            book.undo()
            assert_same(before, photograph(training))
            with pytest.raises(InputError, match="in force"):
                book.undo()


@pytest.mark.slow
def test_steps_are_finite_and_undo_after_them_gives_a_training_that_goes_on(subtests):
    for name in NAMES:
        with subtests.test(name=name):
            training = training_for(name)
            structure = [photograph(training)[k] for k in ("modules", "hooks", "optimizer")]
            book = make(name).apply(training)
            seen = [training.run_step() for _ in range(6)]
            assert all(math.isfinite(s.loss) for s in seen)
            assert all(torch.isfinite(p).all() for p in training.model.parameters())
            book.undo()
            now = photograph(training)
            assert structure == [now[k] for k in ("modules", "hooks", "optimizer")] and not training.hooks
            assert math.isfinite(training.run_step().loss)


def test_the_function_is_kept_where_promised(subtests):
    for name in [n for n in NAMES if TABLE.keeps_function[n]]:
        with subtests.test(name=name):
            training = training_for(name)
            batch = training.batches(0)[0]
            before = outputs(training, batch)
            make(name).apply(training)
            torch.testing.assert_close(outputs(training, batch), before, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["qk_norm", "qkv_norm"])
def test_a_ramp_keeps_the_function_at_first_and_ends_at_the_norm(name):
    training = training_for(name)
    before = outputs(training)
    at_once = copy.deepcopy(training.model)
    fix(name, ramp=3).apply(training)
    assert torch.equal(outputs(training), before)
    hook = training.hooks[0]
    for _ in range(3):
        hook.after_step(training)
    other = training_for(name)
    other.model.load_state_dict(at_once.state_dict())
    fix(name).apply(other)
    torch.testing.assert_close(outputs(training), outputs(other))


def test_gradients_summed_in_float32_are_unscaled_all_the_same(subtests):
    def step_with(*names, scaler=None):
        "A step of SGD, whose update is as large as its gradient."
        training = training_for("grad_sum_fp32", steps=0)
        training.model.eval()  # without dropout
        training.optimizer, training.scaler = torch.optim.SGD(training.model.parameters(), lr=0.1), scaler
        apply_all(training, [fix(name) for name in names])
        return training.run_step(), training.model.state_dict()

    plain, weights = step_with("grad_sum_fp32")
    for case in (("loss_scaling", None), ("predivide", None), (None, torch.amp.GradScaler("cpu"))):
        with subtests.test(case=case):
            name, scaler = case
            stepped, own = step_with("grad_sum_fp32", *([name] if name else []), scaler=scaler)
            assert stepped.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
            torch.testing.assert_close(own, weights)


GUARDS = [
    "zclip",
    "adagc",
    "spam",
    "stable_spam",
    "skip_above",
    "skip_sigma",
    "skip_non_finite",
    "loss_scaling",
]


def spoilt(loss, bad):
    "The loss plus something that is not finite."
    return lambda model, batch: loss(model, batch) + model.lm_head.weight.sum() * bad


def test_a_guard_selects_and_never_multiplies(subtests):
    for bad in [float("nan"), float("inf"), -float("inf")]:
        for name in GUARDS:
            with subtests.test(bad=bad, name=name):
                training = training_for(name)
                make(name).apply(training)
                for _ in range(3):
                    training.run_step()
                plain, before = training.loss, photograph(training)
                training.loss = spoilt(plain, bad)
                assert training.run_step().skipped
                after = photograph(training)
                assert same(before["values"], after["values"]) and same(before["moments"], after["moments"])
                training.loss = plain
                seen = training.run_step()
                assert not seen.skipped and math.isfinite(seen.loss)
                assert all(torch.isfinite(p).all() for p in training.model.parameters())


def run_on(training, n):
    "The losses of the next steps."
    return [training.run_step().loss for _ in range(n)]


@pytest.mark.slow  # two trainings of every fix
def test_a_state_goes_through_save_and_resume(tmp_path, subtests):
    for name in NAMES:
        with subtests.test(name=name):
            training = training_for(name)
            make(name).apply(training)
            run_on(training, 3)
            torch.save(training.state_dict(), tmp_path / "state.pt")
            through = run_on(training, 4)
            other = training_for(name)
            make(name).apply(other)
            other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
            assert run_on(other, 4) == through
            assert same(training.model.state_dict(), other.model.state_dict())


@pytest.mark.slow  # every fix in two types
def test_16_bit_weights_and_moments(subtests):
    for dtype in [torch.bfloat16, torch.float16]:
        for name in NAMES:
            with subtests.test(dtype=dtype, name=name):
                if name in FROZEN and dtype == torch.float16:
                    pytest.skip("pictures are float32")
                training = training_for(name, steps=0)
                training.model.to(dtype)
                if name in FROZEN:
                    batch = training.batches(0)[0]
                    batch["pictures"] = batch["pictures"].to(dtype)
                for group in training.optimizer.param_groups:
                    group["eps"] = 1e-4  # fp16 has no 1e-7 that stays itself
                training.keep()
                training.run_step()
                if name in ("safe_preset",) and dtype == torch.float16:
                    with pytest.raises(InputError, match="fp16 turns 1e-8 to 0"):
                        make(name).apply(training)
                    continue
                kinds = {torch.bfloat16: "bf16", torch.float16: "fp16"}
                chosen = {"adam_eps": {"eps": 1e-4}, "autocast": {"kind": kinds[dtype]}}.get(name)
                one = make(name) if chosen is None else fix(name, **chosen)
                before = photograph(training)
                book = one.apply(training)
                for _ in range(2):
                    assert math.isfinite(training.run_step().loss)
                if name != "weight_type":
                    assert all(p.dtype == dtype for p in training.model.parameters())
                book.undo()
                assert photograph(training)["modules"] == before["modules"]
                assert all(p.dtype == dtype for p in training.model.parameters())


def test_undo_is_last_in_first_out_and_conflicts_are_told():
    training = training_for("qk_norm")
    before = photograph(training)
    many = [
        "qk_norm",
        "soft_cap_attention",
        "gated_attention",
        "embedding_norm",
        "z_loss",
        "lower_lr",
        "zclip",
    ]
    books = apply_all(training, [fix(n) for n in many])
    run_on(training, 2)
    with pytest.raises(InputError, match=r"undo .*zclip first"):
        books[0].undo()
    with pytest.raises(InputError, match=r"both take attention\.qk"):
        fix("qkv_norm").apply(training)
    for book in reversed(books):
        book.undo()
    after = photograph(training)
    for part in ("modules", "hooks", "optimizer", "tensors"):
        assert same(before[part], after[part]), part
    table = conflicts([fix("clip_norm"), fix("no_clip"), fix("placebo")])
    assert table[["first", "second", "slot"]].values.tolist() == [["clip_norm", "no_clip", "clip"]]


def test_where_one_cannot_be_applied_none_is():
    training = training_for("qk_norm")
    before = photograph(training)
    with pytest.raises(InputError, match="frozen"):
        apply_all(training, [fix("qk_norm"), fix("unfreeze")])
    assert_same(before, photograph(training))


def test_what_arms_are_compared_by_stays_the_plain_loss():
    training = training_for("z_loss")
    for part in training.model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    batch = training.batches(training.step)
    torch.manual_seed(1)
    want = sum(training.measure(training.model, part).item() for part in batch) / len(batch)
    apply_all(training, [fix("z_loss", weight=1.0), fix("label_smoothing"), fix("loss_fp32")])
    torch.manual_seed(1)  # what the model draws by itself is drawn again
    seen = training.run_step()
    assert seen.loss == pytest.approx(want, rel=1e-6)
    assert training.loss(training.model, batch[0]).item() > want + 1


def test_a_copy_of_a_fixed_model_has_its_own_fix():
    training = training_for("qk_norm")
    apply_all(training, [fix("qk_norm"), fix("soft_cap_attention", cap=5.0)])
    twin = copy.deepcopy(training.model).eval()
    before = outputs(training)
    batch = training.batches(0)[0]
    with torch.no_grad():
        for p in training.model.parameters():
            p.add_(1.0)
        again = twin(batch["tokens"])
    assert torch.equal(before, again)


def test_parameters_have_ranges(subtests):
    for name in NAMES:
        with subtests.test(name=name):
            for parameter, rules in parameter_ranges(fix(name)).items():
                assert {"low", "high"} <= set(rules) or "choices" in rules, (name, parameter)
                bad = "no such" if "choices" in rules else rules["high"] * 2 + 1
                with pytest.raises(InputError, match=parameter):
                    fix(name, **{parameter: bad})


RANKS = ["qk_norm", "zclip", "update_clip", "loss_scaling", "z_loss", "embedding_norm"]


def _rank(rank, meet, queue):
    "Three steps under DDP; the ranks see different rows."
    torch.distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    for name in RANKS:
        training = _plain_training()
        make(name).apply(training)
        whole = training.batches
        rows = slice(4 * rank, 4 * rank + 4)
        training.batches = lambda step, whole=whole, rows=rows: [
            {k: v[rows] for k, v in whole(step)[0].items()}
        ]
        wrapped = DistributedDataParallel(training.model)
        training.loss = _through(training.loss, wrapped)
        training.measure = training.loss
        run_on(training, 3)
        if rank == 0:
            queue.put((name, [p.detach().numpy().copy() for p in training.model.parameters()]))
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _through(loss, wrapped):
    "The loss of the wrapped model."
    return lambda model, batch: loss(wrapped, batch)


def _plain_training():
    "Eight rows a step, without dropout."
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab=16, d_model=16, n_layer=1, n_head=2, seq=16))
    task = copy_task(length=5, vocab=16, batch=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    return Training(model, optimizer, model_loss, lambda step: [task.at(step)])


@pytest.mark.slow  # starts two processes
@pytest.mark.timeout(300)
def test_two_ranks_do_what_one_does(tmp_path):
    context = mp.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, tmp_path / "meet", queue)) for r in range(2)]
    for process in ranks:
        process.start()
    got = dict(queue.get(timeout=200) for _ in RANKS)
    for process in ranks:
        process.join(60)
    for name in RANKS:
        training = _plain_training()
        make(name).apply(training)
        run_on(training, 3)
        for mine, theirs in zip(training.model.parameters(), got[name], strict=True):
            torch.testing.assert_close(mine.detach(), torch.from_numpy(theirs), rtol=1e-3, atol=1e-4)


class _Encoder(torch.nn.Module):
    "PyTorch's layer, whose attention drops by a float of its own, and a gate that is no activation."

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(16, 16)
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, activation=torch.nn.GELU())
        self.gate, self.thin, self.head = torch.nn.Sigmoid(), torch.nn.Dropout1d(0.2), torch.nn.Linear(16, 16)

    def forward(self, tokens):
        x = self.layer(self.embed(tokens))
        return self.head(self.thin(x * self.gate(x)))


def _training_of(make):
    "A training of a model of tokens that predicts its own input."
    torch.manual_seed(0)
    model, tokens = make(), torch.randint(16, (4, 6))
    loss = lambda model, batch: F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())  # noqa: E731
    return Training(model, torch.optim.AdamW(model.parameters()), loss, lambda step: [tokens])


def test_no_dropout_reaches_what_attention_drops_by_itself():
    training = _training_of(_Encoder)
    fix("dropout").apply(training)
    losses = {float(training.loss(training.model, training.batches(0)[0]).detach()) for _ in range(3)}
    assert len(losses) == 1 and training.model.layer.self_attn.dropout == training.model.thin.p == 0


def test_another_activation_leaves_attention_and_gates_alone():
    training = _training_of(_Encoder)
    fix("activation").apply(training)
    model = training.model
    assert type(model.layer.activation) is torch.nn.ReLU and type(model.gate) is torch.nn.Sigmoid
    assert type(model.layer.self_attn) is torch.nn.MultiheadAttention


class _Recurrent(torch.nn.Module):
    "A recurrent layer, PyTorch's attention, and a number with a common name far from the table."

    def __init__(self):
        super().__init__()
        self.embed, self.lstm = torch.nn.Embedding(16, 16), torch.nn.LSTM(16, 16, batch_first=True)
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = torch.nn.Linear(16, 16)
        self.head.factor, self.embed_scale = 0.5, 4.0

    def forward(self, tokens):
        x = self.lstm(self.embed(tokens) * self.embed_scale)[0]
        return self.head(self.attention(x, x, x)[0])


@pytest.mark.parametrize("rule, std", [("normal", 0.02), ("fan_in", 0.25)])
def test_redraw_reaches_every_matrix_of_pytorchs_own_layers(rule, std):
    training = _training_of(_Recurrent)
    fix("redraw", rule=rule, divide=False).apply(training)
    drawn = {name: float(p.detach().std()) for name, p in training.model.named_parameters() if p.ndim > 1}
    assert all(0.8 * std < value < 1.2 * std for value in drawn.values()), drawn
    assert all(not p.any() for name, p in training.model.named_parameters() if "bias" in name)


def test_only_the_factor_of_an_embedding_is_removed():
    training = _training_of(_Recurrent)
    fix("no_embedding_scale").apply(training)
    assert (training.model.embed_scale, training.model.head.factor) == (1.0, 0.5)


def test_a_head_is_not_taken_from_a_block_nor_positions_from_a_name():
    block = lambda: torch.nn.ModuleDict({"output": torch.nn.Linear(8, 8)})  # noqa: E731
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([block(), block()])})
    model["composer"], model["pos_embed"] = torch.nn.Embedding(9, 8), torch.nn.Embedding(5, 8)
    assert output_layer(model) is None
    model["head"] = torch.nn.Linear(8, 9)
    assert output_layer(model)[0] == "head"
    assert (list(embedding_tables(model)), list(embedding_tables(model, True))) == (
        ["composer"],
        ["pos_embed"],
    )


def test_groups_that_are_split_keep_their_rate():
    training = _training_of(_Recurrent)
    table, rest = training.model.embed.weight, [p for p in training.model.parameters()][1:]
    groups = [{"params": rest, "lr": 0.1}, {"params": [table, training.model.head.weight], "lr": 0.02}]
    groups[0]["params"] = [p for p in rest if p is not training.model.head.weight]
    training.optimizer = torch.optim.AdamW(groups)
    fix("lower_lr", factor=0.5).apply(training)
    fix("no_decay_on_small").apply(training)
    training.run_step()
    rates = {id(p): group["lr"] for group in training.optimizer.param_groups for p in group["params"]}
    assert rates[id(table)] == rates[id(training.model.head.weight)] == pytest.approx(0.01)
    assert rates[id(training.model.lstm.weight_ih_l0)] == pytest.approx(0.05)


def test_muon_leaves_tables_of_positions_to_adamw():
    training = training_for("muon")
    fix("muon").apply(training)
    matrices = {id(p) for g in training.optimizer.param_groups if g["muon"] for p in g["params"]}
    tables = embedding_tables(training.model, True)
    assert tables and not matrices & {id(table.weight) for table in tables.values()}
