"Batches of every class, Hugging Face's accumulation and several ranks come back as they were."

import argparse
import shutil
import sys
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from stabilitylab.mcp.reading import batch_rows
from stabilitylab.models.decoder import LanguageModel
from stabilitylab.models.parts import ModelConfig
from stabilitylab.names.errors import InputError
from stabilitylab.numerics.pytree import (
    batch_form,
    container_kind,
    loop_tensors,
    parts_of,
    restore_batch,
    storable_copy,
)
from stabilitylab.probe.draft.loop_values import can_keep
from stabilitylab.probe.draft.setup_template import setup_source
from stabilitylab.probe.recorder import Recorder
from stabilitylab.replay.blame import blame
from stabilitylab.replay.resume import is_same
from stabilitylab.replay.samples import count_samples, one_sample
from stabilitylab.replay.setup_check import check_setup
from stabilitylab.replay.snapshot import load_batch, load_snapshot, replayable_steps
from stabilitylab.replay.state import Setup
from tests.command import begin

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    y: object
    name: str = "a"


class Lazy:
    "No container that can be stored."

    def __init__(self, x):
        self.x = lambda: x


def encoding(x, y):
    from transformers import BatchEncoding

    return BatchEncoding({"x": x, "y": y})


def feature(x, y):
    from transformers import BatchFeature

    return BatchFeature({"x": x, "y": y})


class Row:
    "A batch as a loader's own class holds it: tensors, a number, and the data set that it came from."

    def __init__(self, x, y):
        self.x, self.y, self.size, self.source = x, y, len(x), object()

    def __len__(self):
        return self.size


def nested(x, y):
    return {"a": [Sample(x, Pair(np.float32(0.5), y))], "b": (argparse.Namespace(scale=2), np.arange(3))}


def attributes(batch):
    return batch.x, batch.y


def of_nested(batch):
    inside = batch["a"][0]
    assert type(inside) is Sample and type(inside.y) is Pair and batch["b"][0].scale == 2
    assert type(inside.y.x) is np.float32 and type(batch["b"][1]) is np.ndarray
    return inside.x, inside.y.y


KINDS = {  # how a batch is made, how a loss reads it
    "named tuple": (Pair, attributes),
    "dataclass": (Sample, attributes),
    "namespace": (lambda x, y: SimpleNamespace(x=x, y=y), attributes),
    "a loader's own": (Row, attributes),
    "ordered dict": (lambda x, y: OrderedDict(x=x, y=y), lambda batch: (batch["x"], batch["y"])),
    "BatchEncoding": (encoding, attributes),
    "BatchFeature": (feature, attributes),
    "nested": (nested, of_nested),
    "list": (lambda x, y: [x, y], tuple),
}


def train(path, make, read, steps=3):
    torch.manual_seed(0)
    setup = Setup(
        lambda: nn.Linear(4, 1),
        lambda model, batch: (model(read(batch)[0])[:, 0] - read(batch)[1]).square().mean(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    model = setup.model()
    optimizer = setup.optimizer(model)
    with Recorder(model, optimizer, path, snapshot_every=10, merge=False) as recorder:
        for _ in range(steps):
            x = torch.randn(8, 4)
            loss = setup.loss(model, recorder.batch(make(x, x.sum(1))))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)
    return setup


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_comes_back_as_what_it_was(tmp_path, kind):
    make, read = KINDS[kind]
    setup = train(tmp_path / "run", make, read)
    assert check_setup(tmp_path / "run", 2, setup).is_exact
    example = make(torch.zeros(1), torch.zeros(1))
    assert type(load_batch(tmp_path / "run", 1, setup).parts[0]) is type(example)


@pytest.mark.slow
def test_a_batch_that_cannot_come_back_is_not_offered(tmp_path):
    train(tmp_path / "run", lambda x, y: {"x": x, "lazy": Lazy(y)}, lambda b: (b["x"], b["x"].sum(1)))
    assert replayable_steps(tmp_path / "run") == []
    with pytest.raises(ValueError, match=r"batch\['lazy'\] is a Lazy"):
        load_batch(tmp_path / "run", 1)


def test_an_object_of_the_loop_is_no_batch_and_is_not_kept_as_its_tensors_alone():
    row = Row(torch.zeros(2, 3), np.zeros(2))
    assert container_kind(row) == "object" and "source" not in parts_of(row)
    assert not can_keep(row)
    assert not container_kind(nn.Linear(1, 1)) and not container_kind(torch.Generator())


def test_a_class_that_nobody_imported_is_not_imported(tmp_path):

    with pytest.raises(InputError, match="import Batch there"):
        restore_batch({"x": 1}, [[[], "dataclass", "this:Batch"]])
    assert "this" not in sys.modules


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=40
    )
    return LlamaForCausalLM(LlamaConfig(**sizes))


@pytest.mark.slow
def test_a_run_of_the_trainer_with_accumulation(tmp_path):
    "The loss of a micro-batch is divided by the tokens of the whole step, so that the parts are added up."
    transformers = pytest.importorskip("transformers")
    from stabilitylab.probe.hf import RecorderCallback
    from stabilitylab.replay.user_code import load_setup

    torch.manual_seed(0)
    model = tiny_llama()
    rows = [torch.randint(0, 40, (12,)) for _ in range(24)]
    data = [{"input_ids": row, "labels": row.clone()} for row in rows]
    for i, row in enumerate(data):  # so that micro-batches have other numbers of tokens
        row["labels"][: i % 9] = -100
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        max_steps=4,
        learning_rate=1e-2,
        warmup_steps=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    recorded = RecorderCallback(tmp_path / "run", snapshot_every=10, merge=False)
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=[recorded]).train()
    setup = load_setup(f"{tmp_path}/run/replay_setup.py", tmp_path / "run")
    part = load_batch(tmp_path / "run", 2).parts[0]
    assert "num_items_in_batch" in part and setup.clip == 1.0
    check = check_setup(tmp_path / "run", 3, setup)
    assert check.is_exact, check.words
    samples = blame(load_snapshot(tmp_path / "run", 3, setup), load_batch(tmp_path / "run", 3))
    assert len(samples) == 6 and samples.share.sum() == pytest.approx(1)
    mean = Setup(tiny_llama, setup.loss, setup.optimizer, clip=1.0, reduction="mean")
    assert check_setup(tmp_path / "run", 3, mean).fault == "accumulation"


LOOP = """
import sys, torch, torch.distributed as dist
from stabilitylab.models.parts import ModelConfig
from stabilitylab.models.decoder import LanguageModel
from stabilitylab.names.errors import InputError
from stabilitylab.probe.recorder import Recorder
path, meet, rank, how = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group('gloo', init_method=f'file://{meet}', rank=rank, world_size=2)
torch.manual_seed(0)
model = LanguageModel(ModelConfig.plain(d_model=30, n_head=2, n_layer=1, seq=16, dropout=0.1))
if how == 'ddp':
    model = torch.nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.fsdp import fully_shard
    mesh = torch.distributed.init_device_mesh('cpu', (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=.1)
generator = torch.Generator().manual_seed(rank)
torch.manual_seed(100 + rank)
with Recorder(model, optimizer, path, snapshot_every=2) as recorder:
    for step in range(5):
        x = recorder.batch(torch.randint(0, 128, (4, 16), generator=generator))
        loss = model(x, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.step(loss)
dist.destroy_process_group()
"""


@pytest.mark.slow  # starts two processes
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_one_process_takes_the_step_of_two(tmp_path, how):
    (tmp_path / "loop.py").write_text(LOOP)
    words = tmp_path / "run", tmp_path / "meet"
    ranks = [begin(tmp_path / "loop.py", *words, rank, how) for rank in (0, 1)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    config = ModelConfig.plain(d_model=30, n_head=2, n_layer=1, seq=16, dropout=0.1)
    setup = Setup(
        lambda: LanguageModel(config),
        lambda model, x: model(x, x),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
    )
    batch = load_batch(tmp_path / "run", 3)
    assert len(batch.parts) == 2 and not torch.equal(*batch.parts)
    for step in (2, 3, 4):
        check = check_setup(tmp_path / "run", step, setup)
        assert check.is_step and check.fault in ("", "rounding"), check.words
        assert max(_distance(row) for row in check.checks if row.state != "not recorded") < 1e-4
    shutil.rmtree(tmp_path / "run" / "blackbox" / "rank-1")
    with pytest.raises(ValueError, match="1 of 2 ranks"):
        check_setup(tmp_path / "run", 3, setup)


def _distance(row):
    from stabilitylab.replay.retrace import distance

    return distance(row.recorded, row.replayed) if isinstance(row.recorded, float) else 0.0


def test_samples_are_cut_from_the_batch_and_not_from_the_loops_values():
    batch = {"x": torch.arange(6.0).reshape(3, 2), "y": torch.arange(3)}
    part = {"batch": batch, "loop": {"step": 7}}
    assert count_samples(part) == count_samples(batch) == 3
    assert one_sample(part, 1)["loop"] == {"step": 7} and one_sample(part, 1)["batch"]["y"].tolist() == [1]
    assert one_sample(batch, 1)["y"].tolist() == [1]
    with pytest.raises(InputError, match="nothing says which part of them belongs to a sample"):
        count_samples({"batch": batch, "loop": {"hidden": torch.zeros(3, 4)}})


def _kept_run(path):
    "A record whose loop has a counter that the loss reads: the black box keeps it with each batch."
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, path, snapshot_every=2) as recorder:
        for step in range(6):
            x = recorder.batch({"x": torch.randn(8, 2), "num_items_in_batch": 8})["x"]
            loss = model(x).square().mean() + 0.0 * step
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss)
    return path


@pytest.mark.slow
def test_a_setup_by_hand_gets_the_batch_and_one_that_asks_the_values_too(tmp_path):
    path = _kept_run(tmp_path / "r")
    seen = []

    def loss(model, batch):
        return model(batch["x"]).square().mean()

    def knowing(model, batch, loop):
        seen.append(loop["step"])
        return loss(model, batch)

    for function in (loss, knowing):
        setup = Setup(
            lambda: torch.nn.Linear(2, 1),
            function,
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            reduction="mean",
        )
        assert check_setup(path, 5, setup).is_exact
    assert set(seen) == {4, 5}


@pytest.mark.slow
def test_statistics_of_a_batch_leave_out_the_weights_of_other_networks(tmp_path):
    path = _kept_run(tmp_path / "r")
    assert batch_rows(path, [3]).tensor.tolist() == ["x"]
    network = torch.nn.Linear(3, 3)
    part = {
        "batch": torch.ones(4),
        "loop": {"net": {"state": network.state_dict(), "training": True}, "hidden": torch.ones(2, 4)},
    }
    assert list(loop_tensors(part)) == ["hidden"]


def test_data_fixes_read_the_batch_beside_values_of_the_loop():
    from stabilitylab.fixes.registry import fix
    from stabilitylab.fixes.training import Training

    def batches(step):
        return [{"batch": {"tokens": torch.arange(48).reshape(4, 12) % 11}, "loop": {"step": step}}]

    model = torch.nn.Linear(2, 1)
    training = Training(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: None, batches)
    fix("curriculum", start=0.5, steps=10).apply(training)
    fix("batch_warmup", start=0.5, steps=10).apply(training)
    part = training.batches(0)[0]
    assert part["batch"]["tokens"].shape == (2, 6) and part["loop"] == {"step": 0}
    fix("drop_repeats").apply(training)
    assert training.batches(0)[0]["loop"] == {"step": 0}


def test_rows_are_not_dropped_where_a_hidden_state_has_them_too():
    from stabilitylab.fixes.registry import fix
    from stabilitylab.fixes.training import Training

    part = {"batch": torch.ones(4, 2), "loop": {"hidden": torch.ones(4, 3)}}
    model = torch.nn.Linear(2, 1)
    training = Training(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: None, lambda s: [part]
    )
    fix("batch_warmup", start=0.5, steps=10).apply(training)
    with pytest.raises(InputError, match="hidden"):
        training.batches(0)


def test_graphs_come_back_as_the_class_that_they_were(tmp_path):
    "PyTorch Geometric makes the class of a batch of graphs while it runs: no module has it under its name."
    data = pytest.importorskip("torch_geometric.data")
    plain = data.Data(x=torch.randn(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]]), y=torch.tensor([1]))
    several = data.HeteroData()
    several["user"].x, several["item"].x = torch.randn(2, 4), torch.randn(3, 4)
    several["user", "rates", "item"].edge_index = torch.tensor([[0, 1], [2, 0]])
    joined = [data.Batch.from_data_list([graph, graph]) for graph in (plain, several)]
    for graph in (plain, several, *joined):
        batch = {"graph": graph, "step": 3}
        torch.save(storable_copy(batch), tmp_path / "batch.pt")
        restored = restore_batch(torch.load(tmp_path / "batch.pt", weights_only=True), batch_form(batch))
        assert type(restored["graph"]) is type(graph) and is_same(restored, batch)
        assert restored["graph"].num_nodes == graph.num_nodes


class Rows(dict):
    "A mapping of one's own."


def test_a_draft_imports_the_classes_inside_of_a_batch():
    model = nn.Linear(2, 1)
    batch = {"rows": [Rows(x=torch.zeros(1, 2))]}
    text = setup_source(model, [torch.optim.SGD(model.parameters(), lr=0.1)], batch)
    assert f"from {Rows.__module__} import Rows" in text
