"Replays and trials on a chosen device; CUDA is made up, as no test here ever saw one."

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stabilitylab.cases.registry import sample
from stabilitylab.fixes.training import Training
from stabilitylab.probe.draft.python_source import Draft
from stabilitylab.probe.recorder import Recorder
from stabilitylab.replay import setup_check
from stabilitylab.replay.device import chosen_devices, device_settings, on_other_device
from stabilitylab.replay.examine import examine
from stabilitylab.replay.setup_check import check_setup
from stabilitylab.replay.setup_file import setup_of
from stabilitylab.replay.snapshot import load_batch, load_snapshot
from stabilitylab.replay.state import Setup
from stabilitylab.run.job import JobState
from stabilitylab.run.recording import opened
from stabilitylab.trial import tasks
from stabilitylab.trial.arm import Arm
from stabilitylab.trial.start import Start
from stabilitylab.trial.trial import MemoryNeed, Trial, arms_at_once, memory_need
from tests.command import command
from tests.device.shadow import Shadow
from tests.device.shadow import device as shadow_device

START = Start(str(sample()), 300)


class MadeUp:
    "Two CUDA devices that are the CPU: what is moved there is noted and stays."

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: float = 80e9):
        self.moves: list[tuple[str, str]] = []
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "is_initialized": lambda: False,
            "get_device_name": lambda device: "a GPU",
            "get_device_properties": lambda device: None,
            "mem_get_info": lambda index: (free, 80e9),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        module, tensor = torch.nn.Module.to, torch.Tensor.to

        def move_module(this, *args, device=None, **kwargs):
            if str(device or (args and args[0])).startswith("cuda"):
                self.moves.append(("model", str(device or args[0])))
                return module(this, **({"dtype": kwargs["dtype"]} if kwargs.get("dtype") else {}))
            return module(this, *args, **({"device": device} if device else {}), **kwargs)

        def move_tensor(this, *args, **kwargs):
            if args and str(args[0]).startswith("cuda"):
                self.moves.append(("tensor", str(args[0])))
                return this
            return tensor(this, *args, **kwargs)

        monkeypatch.setattr(torch.nn.Module, "to", move_module)
        monkeypatch.setattr(torch.Tensor, "to", move_tensor)


def test_model_and_batch_of_a_snapshot_go_to_the_device_of_the_setup(monkeypatch):
    gpu = MadeUp(monkeypatch)
    setup = replace(setup_of(sample()), device="cuda:1")
    load_snapshot(sample(), 300, setup).build()
    assert gpu.moves == [("model", "cuda:1")]
    gpu.moves.clear()
    load_batch(sample(), 300, setup)
    assert gpu.moves and set(gpu.moves) == {("tensor", "cuda:1")}


def test_a_training_goes_to_its_device_from_a_record_and_from_a_function(monkeypatch):
    gpu = MadeUp(monkeypatch)
    START.build(0, "cuda:1").run_step()
    assert ("model", "cuda:1") in gpu.moves and ("tensor", "cuda:1") in gpu.moves
    gpu.moves.clear()
    Start(function="tests.test_chosen_device:tiny").build(0, "cuda:0").run_step()
    assert gpu.moves == [("model", "cuda:0"), ("tensor", "cuda:0")]


def tiny(seed: int, until: str = "") -> Training:
    "One layer; it stays before its twelfth step until there is a file."
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 1)

    def batches(step: int) -> list:
        while until and step >= 11 and not Path(until).exists():
            time.sleep(0.02)
        return [torch.ones(2, 4)]

    loss = lambda model, x: model(x).pow(2).mean() + 1  # noqa: E731
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.01), loss, batches)


@pytest.mark.slow  # replays twice
def test_a_replay_on_another_device_says_where_it_was(monkeypatch):
    MadeUp(monkeypatch)
    found = examine(sample(), 350, swap=False, samples=False, device="cuda")
    assert found.to_dict()["device"]["device"] == "cuda:0" and found.device["name"] == "a GPU"
    at_home = examine(sample(), 350, swap=False, samples=False)
    assert at_home.device["device"] == "cpu"  # the sample was recorded on one


@pytest.mark.slow  # replays twice
def test_dropout_of_another_generator_is_named(monkeypatch):
    setup = replace(setup_of(sample()), device="cuda:0")
    noisy = replace(setup, loss=lambda model, part: setup.loss(model, part) * (1 + 0.1 * torch.rand(())))
    MadeUp(monkeypatch)
    check = setup_check.check_setup(sample(), 350, noisy)
    assert check.fault == "generator" and not check.is_step
    assert "the generator of cuda is not that of cpu" in check.words
    steady = replace(setup, loss=lambda model, part: setup.loss(model, part) * 1.1)
    assert setup_check.check_setup(sample(), 350, steady).fault != "generator"
    way = setup_check.retrace(sample(), 350, setup)
    assert setup_check._facts(sample(), setup, way).changed["device"] == ("cpu", "cuda")
    assert "device" not in setup_check._facts(sample(), replace(setup, device="cpu"), way).changed


def test_a_record_says_on_which_kind_of_device_the_model_was(tmp_path):
    from stabilitylab import Recorder

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "run") as recorder:
        model(recorder.batch(torch.ones(1, 2))).sum().backward()
        optimizer.step()
    assert opened(tmp_path / "run").run.attrs["device"] == "cpu"


@pytest.mark.slow  # replays with every part
def test_no_part_of_a_replay_nor_a_trial_meets_a_tensor_of_another_device(monkeypatch):
    monkeypatch.setattr("stabilitylab.replay.device.devices", lambda: ["cuda:0", "cpu"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "simulated")
    numpy = Shadow.numpy
    copied = lambda this, *, force=False: this.host.detach().numpy() if force else numpy(this)  # noqa: E731
    monkeypatch.setattr(Shadow, "numpy", copied)  # `force` copies to the CPU first
    with shadow_device():
        training = START.build(0, "cuda:0")
        steps = [training.run_step() for _ in range(2)]
        found = examine(sample(), 350, swap=False, precisions=["bf16"], modules=True, device="cuda:0")
    at_home = START.build(0)
    for step in steps:  # norms are added in another order there
        again = at_home.run_step()
        assert step.loss == pytest.approx(again.loss, rel=1e-5)
        assert step.grad_norm == pytest.approx(again.grad_norm, rel=1e-4)
    assert found.check.is_step and not found.left_out and found.device["device"] == "cuda:0"
    assert len(found.samples) and len(found.modules) and found.tokens


def test_settings_of_tf32_are_told(monkeypatch):
    MadeUp(monkeypatch)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert device_settings("cuda:0")["tf32"] is True


class Idle:
    "A job that was begun and does nothing."

    def __init__(self, state: JobState):
        self.state = state

    def poll(self) -> JobState:
        return self.state

    def cancel(self) -> None:
        pass


RUNNING = JobState("running", "training", 0.0)


def begun(monkeypatch: pytest.MonkeyPatch, told: dict | None = None) -> list[str]:
    "The devices of the parts that are begun, instead of children."
    where: list[str] = []
    monkeypatch.setattr(
        tasks, "begin_work", lambda c, f, arguments, *a: where.append(arguments["device"]) or Idle(RUNNING)
    )
    answer = JobState("done", "done", 1.0, told)
    monkeypatch.setattr(tasks.Job, "of", classmethod(lambda cls, *a, **k: Idle(answer)))
    return where


def test_arms_are_dealt_to_all_devices_as_far_as_they_fit(monkeypatch):
    MadeUp(monkeypatch)
    where = begun(monkeypatch, {"fitting": 3, "words": "3 at once instead of 8: one arm takes much"})
    trial = Trial(START, ["lower_lr", "qk_norm", "clip_norm"], steps=5, seeds=2, workers=8)
    trial.poll()
    assert where == ["cuda:0", "cuda:1", "cuda:0"]
    result = trial.result()
    assert result.notes == ("3 at once instead of 8: one arm takes much",)
    assert result.device["devices"] == ["cuda:0", "cuda:1"] and result.to_dict()["device"]["tf32"] is False


def test_a_trial_that_does_not_fit_is_refused_before_it_trains(monkeypatch):
    MadeUp(monkeypatch)
    where = begun(monkeypatch, {"fitting": 0, "words": "does not fit: one arm takes 5 GB"})
    trial = Trial(START, ["lower_lr"], steps=5, seeds=1)
    state = trial.poll()
    assert not where and state.ended and "does not fit" in state.failed[0].why


def test_a_cpu_with_room_is_not_measured_and_one_without_is(monkeypatch):
    assert not tasks._may_be_short(START, ["cpu"], 2)
    monkeypatch.setattr(tasks, "free_memory", lambda device: 1e6)
    assert tasks._may_be_short(START, ["cpu"], 2) and tasks._may_be_short(START, ["cuda:0"], 1)


def test_the_need_of_the_sample_is_that_of_its_tensors():
    training = START.build(0)
    need = memory_need(training)
    n_weights = sum(p.numel() for p in training.model.parameters())
    assert need.parameters >= 4 * n_weights and need.gradients == 4 * n_weights
    assert need.optimizer >= 8 * n_weights and need.activations > 0
    half = MemoryNeed(need.parameters, need.gradients, need.optimizer, need.activations // 2)
    assert arms_at_once(half, {"cpu": 2e9}, 99) >= arms_at_once(need, {"cpu": 2e9}, 99) > 0


def test_a_killed_child_is_begun_again_not_for_ever(monkeypatch):
    killed = JobState("failed", "failed", 0.5, None, "the process was ended by SIGKILL", was_killed=True)
    count: list[int] = []
    monkeypatch.setattr(tasks, "begin_work", lambda *a: count.append(1) or Idle(killed))
    trial = Trial(START, ["lower_lr"], steps=5, seeds=1, workers=2)
    while not (state := trial.poll()).ended:
        pass
    assert len(count) == 2 * (1 + tasks._TRIES) and len(state.failed) == 2
    assert trial._room == 1 and "went on from its last saved state" in trial.result().notes[0]


@pytest.mark.slow  # trains in processes
def test_a_child_that_is_killed_once_ends_well(tmp_path):
    go_on = tmp_path / "go_on"
    start = Start(function="tests.test_chosen_device:tiny", arguments={"until": str(go_on)})
    trial = Trial(start, [], steps=20, seeds=1, folder=tmp_path / "trial")
    log = tmp_path / "trial" / "arm-0" / "seed-0" / "metrics.jsonl"
    while not log.is_file() or len(log.read_text().splitlines()) < 11:
        trial.poll()
        time.sleep(0.05)
    os.kill(trial._jobs[next(iter(trial._jobs))].process.pid, signal.SIGKILL)
    go_on.touch()
    result = trial.run(progress=False)
    assert result.complete and len(result.curves[0].loss) == 20
    assert "SIGKILL" in result.notes[0]


@pytest.mark.slow
def test_a_device_that_is_not_here_is_refused(capsys):
    for words in (
        ["replay", str(sample()), "--device", "cuda:3"],
        ["trial", str(sample()), "--device", "tpu"],
    ):
        answer = command(*words, "--json")
        assert answer.returncode == 2 and "--device" in json.loads(answer.stdout)["error"]
    assert chosen_devices("cpu") == ["cpu"] and Arm().name == "unchanged"


@pytest.mark.slow
def test_code_that_names_the_gpu_of_the_run_is_replayed_on_a_cpu(tmp_path):
    "As in a loop that moves its batch after `recorder.batch`, with tensors and an autocast of its own."
    path, width = tmp_path / "run", 4
    gpu = "xpu" if torch.cuda.is_available() else "cuda"  # one that this machine has not

    def built():
        return getattr(torch.nn.Linear(width, 1, device=gpu).to(torch.device(f"{gpu}:0")), gpu)()

    def loss(model, batch):
        x = getattr(batch.pin_memory(), gpu)(non_blocking=True).to(f"{gpu}:0", torch.float32)
        weights = torch.tensor([1.0, 2.0], device=gpu).to(device=torch.device(gpu))
        with torch.autocast(gpu, torch.bfloat16):
            out = model(x)
        return (out.float().square().mean(1) * weights).mean()

    def optimizer(model):
        return torch.optim.AdamW(model.parameters())

    setup = Setup(built, loss, optimizer, recorded_on=gpu)
    torch.manual_seed(0)
    model = setup.new_model()
    trained = optimizer(model)
    with Recorder(model, trained, path, snapshot_every=2, merge=False) as recorder:
        for _ in range(4):
            value = setup.loss(model, recorder.batch(torch.randn(2, width)))
            trained.zero_grad()
            value.backward()
            trained.step()
            recorder.step(value)
    assert check_setup(path, 3, setup).is_exact
    before = torch.autocast.__init__
    with pytest.raises((AssertionError, RuntimeError)), on_other_device(gpu, "cpu"):
        torch.zeros(2, device="mps")
    assert torch.autocast.__init__ is before
    with pytest.raises((AssertionError, RuntimeError)):  # a device of another kind is no business of a replay
        replace(setup, recorded_on="").new_model()


def test_tensors_of_a_loop_are_written_with_their_device():
    with shadow_device():
        written = Draft().literal(torch.ones(2).to("cuda:0"))
    assert written == "torch.tensor([1.0, 1.0], dtype=torch.float32, device='cuda:0')"
    assert "device" not in Draft().literal(torch.ones(2))
