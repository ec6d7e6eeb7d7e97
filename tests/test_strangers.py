"Programs that nobody here wrote: what recording, replay and attention owe them."

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from stabilitylab import Recorder, diagnose, open_run, replayable_steps
from stabilitylab.cli.main import main
from stabilitylab.probe.attention.report import watch_attention
from stabilitylab.probe.attention.stream import attention_sums
from stabilitylab.probe.draft.loop_code import ValueSources, model_lines
from stabilitylab.probe.draft.loop_setup import _before_line
from stabilitylab.probe.draft.loop_source import stored_names
from stabilitylab.probe.draft.python_source import Draft
from stabilitylab.probe.draft.running_script import import_folders
from stabilitylab.probe.draft.setup_template import setup_source
from stabilitylab.replay.examine import examine
from stabilitylab.replay.retrace import retrace
from stabilitylab.replay.setup_check import check_setup
from stabilitylab.replay.setup_file import todo_lines
from stabilitylab.replay.state import Setup
from stabilitylab.replay.trainer import trainer_like, trainer_loss
from stabilitylab.trial import start
from tests.command import train
from tests.programs import PROGRAMS

pytestmark = pytest.mark.slow  # programs of others, each recorded and replayed


def model_of(source):
    "What the draft's `make_model` returns."
    part = source[source.index("def make_model") : source.index("def loss(")]
    scope = {"torch": torch}
    exec("\n".join(line for line in source.splitlines() if line.startswith("from transformers.")), scope)
    exec(compile(ast.parse(part), "draft", "exec"), scope)
    return scope["make_model"]()


def test_containers_of_torch_are_drafted_with_what_they_contain():
    inner = nn.Sequential(nn.Conv1d(1, 2, 3, bias=False), nn.BatchNorm1d(2, eps=1e-3))
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Dropout(0.3)), "b": inner})
    model["c"] = nn.ModuleList([nn.LayerNorm(4), nn.Embedding(7, 3)])
    made = model_of(setup_source(model, [torch.optim.SGD(model.parameters(), lr=0.1)], torch.zeros(2, 8)))
    assert str(made) == str(model)
    assert {k: v.shape for k, v in made.state_dict().items()} == {
        k: v.shape for k, v in model.state_dict().items()
    }


def test_a_draft_switches_off_the_dropout_that_a_trainer_switched_off():
    "TRL's trainers set every dropout to 0 after the model is made, and the configuration keeps its 0.1."
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=8))
    sgd = [torch.optim.SGD(model.parameters(), lr=0.1)]

    def rates(module):
        return {part.p for part in module.modules() if isinstance(part, nn.Dropout)}

    assert rates(model_of(setup_source(model, sgd, torch.zeros(2, 4)))) == {0.1}
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    assert rates(model_of(setup_source(model, sgd, torch.zeros(2, 4)))) == {0.0}


class Hidden(nn.Module):
    "Keeps none of its arguments."

    def __init__(self, size, dropout=0.5, tied=False, *, norm=nn.LayerNorm):
        super().__init__()
        self.tied = tied
        self.layers = nn.Sequential(nn.Linear(size, size), norm(size), nn.Dropout(dropout))

    def forward(self, x):
        return self.layers(x).square().mean()


def test_a_draft_says_which_defaults_could_not_be_seen(tmp_path):
    model = Hidden(4, dropout=0.1, tied=True)
    model.again = model.layers  # a model that shares weights is not put together from its parts
    text = setup_source(model, [torch.optim.SGD(model.parameters(), lr=0.1)], torch.zeros(2, 4))
    assert "Hidden(size=TODO, tied=True)" in text
    file = tmp_path / "replay_setup.py"
    file.write_text(text)
    (_, words), *_ = todo_lines(file)
    assert "size could not be seen" in words and "dropout=0.5" in words and "norm" in words
    assert "tied" not in words


def test_settings_of_a_group_that_the_optimizer_has_not_are_drafted():
    model = nn.Linear(4, 3)
    group = {"params": model.parameters(), "use_muon": True, "weight_decay": 0.2, "lr": 0.3}
    optimizer = torch.optim.SGD([group], lr=0.1)
    text = setup_source(model, [optimizer], torch.zeros(2, 4))
    assert "'use_muon': True, 'weight_decay': 0.2}" in text


NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width, self.layer = width, nn.Linear(width, 1)
"""


@pytest.mark.parametrize("is_package", [True, False], ids=["package", "folder of modules"])
def test_a_draft_finds_what_the_script_found_by_a_path_of_its_own(tmp_path, monkeypatch, is_package):
    elsewhere, name = tmp_path / "elsewhere", f"theirs_{is_package}"
    (elsewhere / name).mkdir(parents=True)
    (elsewhere / name / "net.py").write_text(NET)
    if is_package:
        (elsewhere / name / "__init__.py").touch()
    by_other_tests = dict.fromkeys(import_folders())
    monkeypatch.syspath_prepend(elsewhere)
    model = importlib.import_module(f"{name}.net").Net(6)
    text = setup_source(model, [torch.optim.SGD(model.parameters(), lr=0.1)], torch.zeros(2, 6))
    (line,) = [line for line in text.splitlines() if line.startswith("sys.path[:0] = ")]
    folders = ast.literal_eval(line.removeprefix("sys.path[:0] = "))
    assert folders[1:] == [str(elsewhere.resolve()), *by_other_tests]
    for module in (name, f"{name}.net"):
        del sys.modules[module]


class Curve(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x, y):
        return F.mse_loss(self.layers(x)[:, 0], y)


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=3)


@pytest.mark.parametrize("is_inside", [True, False], ids=["in the closure", "before it"])
def test_a_step_with_a_closure_comes_back_to_the_last_bit(tmp_path, is_inside):
    torch.manual_seed(0)
    model, data = Curve(), {"x": torch.randn(12, 3), "y": torch.randn(12)}
    optimizer = lbfgs(model)
    with Recorder(model, optimizer, tmp_path / "run", snapshot_every=2) as recorder:
        for _ in range(6):
            kept = data if is_inside else recorder.batch(data)

            def closure(kept=kept):
                optimizer.zero_grad()
                loss = model(**(recorder.batch(kept) if is_inside else kept))
                loss.backward()
                return loss

            recorder.step(optimizer.step(closure))
    setup = Setup(Curve, lambda model, batch: model(**batch), lbfgs)
    step = replayable_steps(tmp_path / "run")[-1]
    way = retrace(tmp_path / "run", step, setup)
    check = check_setup(tmp_path / "run", step, setup, way)
    assert step == 5 and check.is_step
    assert all(one.recorded["loss"] == one.replayed["loss"] for one in way.steps)
    assert all(torch.equal(a, b) for a, b in zip(way.model.parameters(), model.parameters(), strict=True))


def test_a_trial_refuses_a_closure(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model, data = Curve(), {"x": torch.randn(12, 3), "y": torch.randn(12)}
    optimizer = lbfgs(model)
    with Recorder(model, optimizer, tmp_path / "run", snapshot_every=2) as recorder:
        for _ in range(4):

            def closure():
                optimizer.zero_grad()
                loss = model(**recorder.batch(data))
                loss.backward()
                return loss

            recorder.step(optimizer.step(closure))
    setup = Setup(Curve, lambda model, batch: model(**batch), lbfgs)
    monkeypatch.setattr(start, "setup_of", lambda path, name: setup)
    with pytest.raises(ValueError, match="LBFGS, whose step needs a closure"):
        start._recorded_training(SimpleNamespace(path=tmp_path / "run", step=2, setup=""), 0, "cpu")


class Layerwise(Curve):
    "Its `train` is a training loop."

    def train(self, x, y):
        return self(x, y)


def test_a_model_whose_train_is_its_loop_is_built_in_training_mode(tmp_path):
    torch.manual_seed(0)
    model = Layerwise()
    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731 - one line, used twice
    optimizer = make(model)
    with Recorder(model, optimizer, tmp_path / "run", snapshot_every=2) as recorder:
        for _ in range(3):
            optimizer.zero_grad()
            loss = model.train(**recorder.batch({"x": torch.randn(4, 3), "y": torch.randn(4)}))
            loss.backward()
            optimizer.step()
            recorder.step(loss)
    setup = Setup(Layerwise, lambda model, batch: model(**batch), make)
    way = retrace(tmp_path / "run", 2, setup)
    assert check_setup(tmp_path / "run", 2, setup, way).is_step


def test_weights_that_a_loop_moves_by_hand_are_not_said_to_stand_still(tmp_path):
    torch.manual_seed(0)
    model = Curve()
    with Recorder(model, None, tmp_path / "run") as recorder:
        for _ in range(12):
            loss = model(torch.randn(8, 3), torch.randn(8))
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.05 * p.grad
            model.zero_grad()
            recorder.step(loss)
    run = open_run(tmp_path / "run").load()
    assert "no_gradient" not in diagnose(run).kinds
    assert any("no optimizer was given" in text for text in run["events"].event_text.values.tolist())


class Twice(nn.Module):
    "Hides keys before the softmax and sets them to zero behind it, as CPM-Ant does."

    def __init__(self, slot=None):
        super().__init__()
        self.slot, self.softmax = slot, nn.Softmax(dim=-1)

    def forward(self, x):
        hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        scores = (q @ q.mT / 2).masked_fill(hidden, float("-inf"))
        if self.slot is not None:
            scores = torch.cat([scores, self.slot(q)], -1)
        weights = self.softmax(scores)[..., : x.shape[1]].masked_fill(hidden, 0.0)
        return weights @ q


class Holder(nn.Module):
    def __init__(self, slot=None):
        super().__init__()
        self.attn, self.post_attention_dropout = Twice(slot), nn.Dropout(0.1)

    def forward(self, x):
        return self.post_attention_dropout(self.attn(x))


def test_weights_that_are_masked_once_more_stay_those_of_their_module():
    watch = watch_attention(Holder(), torch.randn(2, 5, 8), measure=lambda call: call)
    (caught,) = watch.caught
    assert caught.module == "attn" and caught.statistics.v is not None and watch.unrecognised() == []


def test_a_sink_that_changes_from_query_to_query_is_listed():
    x = torch.randn(2, 5, 8)
    same = watch_attention(Holder(lambda q: torch.full_like(q[..., :1], 0.5)), x, measure=lambda c: c)
    assert same.caught[0].statistics.sinks.tolist() == [0.5, 0.5]
    other = watch_attention(Holder(lambda q: q[..., :1]), x, measure=lambda c: c)
    assert not other.caught and "sinks" in " ".join(other.unrecognised())


class Kernel(nn.Module):
    is_causal = True

    def forward(self, q, k):
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)


def test_torch_counts_causal_queries_from_the_first_key():
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 7, 8)
    (caught,) = watch_attention(Kernel(), (q, k), measure=lambda call: call).caught
    seen = torch.ones(3, 7).tril().bool()
    want = (q @ k.mT / 8**0.5).masked_fill(~seen, -torch.inf).softmax(-1).sum(2)
    torch.testing.assert_close(attention_sums(caught.statistics).column, want.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_plain_program_is_replayed_without_an_edit(tmp_path, capsys, name):
    if "transformers" in PROGRAMS[name]:
        pytest.importorskip("transformers")
    if "accelerate" in PROGRAMS[name]:
        pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(PROGRAMS[name])
    if name == next(iter(PROGRAMS)):  # as a shell starts it; what only a process shows is the same for all
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, check=True)
    else:
        train(tmp_path / "train.py")
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert main(["replay", str(tmp_path / "run"), "--json", "--no-swap", "--no-samples"]) == 0
    check = json.loads(capsys.readouterr().out)["check"]
    assert check["is_step"] and check["is_exact"] and check["fault"] in ("", "other loss"), check["words"]
    assert {path: path.stat().st_mtime_ns for path in files} == files  # the record was not continued


def test_a_table_of_another_file_of_the_program_is_imported(tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    (tmp_path / "tables_of_theirs.py").write_text("class Net:\n    pass\nKINDS = {'net': Net}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)
    kinds = importlib.import_module("tables_of_theirs").KINDS
    draft = Draft()
    assert ValueSources(draft, nn.Linear(2, 1))("KINDS", kinds) == "KINDS"
    assert "from tables_of_theirs import KINDS" in draft.imports
    assert ValueSources(Draft(), nn.Linear(2, 1))("KINDS", dict(kinds)) is None  # not the file's own
    del sys.modules["tables_of_theirs"]


def test_a_trainer_that_writes_its_device_into_its_settings_has_that_of_the_replay():
    model = nn.Linear(2, 1)
    trainer = trainer_like(type("T", (), {}), model, {"device": "cuda:3", "beta": 0.1})
    assert trainer.args.device == torch.device("cpu") and trainer.args.beta == 0.1


def test_a_trainer_that_opens_the_accelerators_autocast_itself_is_replayed():
    class Policy:
        def compute_loss(self, model, inputs):
            with self.accelerator.autocast():
                return model(inputs["x"]).sum()

    model = nn.Linear(2, 1)
    x = torch.ones(3, 2)
    assert trainer_loss(trainer_like(Policy, model), {"x": x}).equal(model(x).sum())


def test_a_trainer_whose_own_batches_count_their_items_is_given_the_count():
    class Policy:
        def compute_loss(self, model, inputs, num_items_in_batch=None):
            return model(**inputs).sum() / inputs["num_items_in_batch"]

    class Net(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    model, batch = Net(2, 1), {"x": torch.ones(3, 2), "num_items_in_batch": torch.tensor(3)}
    assert trainer_loss(trainer_like(Policy, model), batch).equal(model(batch["x"]).sum() / 3)
    with pytest.raises(KeyError, match="num_items_in_batch"):
        trainer_loss(trainer_like(Policy, model), {"x": batch["x"]})


def rebuilt(model):
    "The model that the lines of a draft make, and these lines."
    draft = Draft()
    lines, _ = model_lines(draft, model, None)
    names = {}
    exec("\n".join(sorted(draft.imports)), names)
    exec("def make():\n" + indent("\n".join(lines), "    "), names)
    return names["make"](), lines


@pytest.mark.parametrize(("built_with", "of_tokenizer"), [(0, 1), (None, 1), (1, 1)])
def test_the_padding_that_a_model_was_built_with_is_kept_where_its_configuration_changes(
    built_with, of_tokenizer
):
    config = LlamaConfig(
        vocab_size=7, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4
    )
    config.pad_token_id = built_with
    model = LlamaForCausalLM(config)
    model.config.pad_token_id = of_tokenizer  # as a Trainer does when it begins
    again, lines = rebuilt(model)
    assert again.config.pad_token_id == of_tokenizer
    assert again.get_input_embeddings().padding_idx == built_with
    assert sum("padding_idx" in line for line in lines) == (built_with != of_tokenizer)


@pytest.mark.parametrize("is_switched_off", [True, False])
def test_a_decoder_keeps_the_cache_that_a_trainer_switches_off_for_the_whole_model_alone(is_switched_off):
    "With and without a cache the gradients differ in their last bits, which a high rate magnifies."
    config = T5Config(vocab_size=7, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(config)
    model.config.use_cache = not is_switched_off  # as a Trainer does when it begins
    again, lines = rebuilt(model)
    parts = [(model.get_submodule(n), again.get_submodule(n)) for n in ("", "encoder", "decoder")]
    assert all(was.config.use_cache == now.config.use_cache for was, now in parts)
    assert sum("use_cache = True" in line for line in lines) == is_switched_off


@pytest.mark.parametrize(("line", "names"), [(4, {"loaded"}), (7, {"plain"}), (8, {"loaded", "plain"})])
def test_what_a_model_is_made_by_leaves_out_the_branch_that_did_not_run(line, names):
    code = "net = make()\nif path:\n    loaded = net.load(path)\n    fit()\n"
    code += "else:\n    plain = net\n    fit()\nlater()"
    before = _before_line(ast.parse(code).body, line)
    assert set().union(*map(stored_names, before)) == {"net"} | names


def test_a_step_of_nan_is_replayed_as_the_step_it_was(tmp_path):
    "Norms over weights that are no numbers are NaN in record and replay, and equal."
    torch.manual_seed(0)
    setup = Setup(
        lambda: nn.Linear(3, 1),
        lambda model, x: model(x).pow(2).mean(),
        lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
    )
    model = setup.model()
    optimizer = setup.optimizer(model)
    with Recorder(model, optimizer, tmp_path / "run", snapshot_every=2) as recorder:
        for number in range(5):
            x = torch.randn(4, 3)
            x[0, 0] = torch.nan if number == 3 else 0.0
            loss = setup.loss(model, recorder.batch(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss)
    check = check_setup(tmp_path / "run", 3, setup)
    assert check.is_step and check.is_exact and check.fault == ""
    assert examine(tmp_path / "run", 3, setup, swap=False, samples=False).exact is True
