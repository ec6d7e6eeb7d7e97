"The recorder never changes what a program saves, copies or sends to another process."

import copy
import copyreg
import io
import multiprocessing
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from stabilitylab.probe.recorder import Recorder


class OwnState(nn.Linear):
    "Says itself what is pickled."

    def __getstate__(self):
        return dict(self.__dict__)

    def __setstate__(self, state):
        self.__dict__.update(state)


class OwnCopy(nn.Linear):
    "Copies itself, as WGAN and EMA code does."

    def __deepcopy__(self, memo):
        twin = type(self).__new__(type(self))
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin


class OwnReduce(nn.Linear):
    "Is built anew from its sizes."

    def __reduce__(self):
        return OwnReduce, (self.in_features, self.out_features), {"training": self.training}


class Slots(nn.Linear):
    "Has an attribute outside its dict."

    __slots__ = ("scale",)

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.scale = 2.0


class Registered(nn.Linear):
    "Its program told `copyreg` how it is pickled."


def _reduced_by_program(module):
    return Registered, (module.in_features, module.out_features), module.__dict__


copyreg.pickle(Registered, _reduced_by_program)


def _own_hook(module, args, kwargs, out):
    module.calls = getattr(module, "calls", 0) + 1


KINDS = [nn.Linear, OwnState, OwnCopy, OwnReduce, Slots, Registered]


def _model(kind):
    torch.manual_seed(0)
    model = nn.Sequential(kind(3, 4), nn.Dropout(0.1), nn.LayerNorm(4), nn.Linear(4, 1))
    model[0].register_forward_hook(_own_hook, with_kwargs=True, always_call=True)
    return model


def _saved(thing):
    "Bytes of every way to save it."
    file = io.BytesIO()
    torch.save(thing, file)
    return [file.getvalue(), *(pickle.dumps(thing, protocol) for protocol in (2, 4, 5))]


def _things(model, optimizer):
    "What programs save."
    return {
        "model": model,
        "list": [model, None, optimizer],
        "dict": {"epoch": 1, "model": model, "optimizer": optimizer},
        "modules": nn.ModuleList(model.children()),
        "state": model.state_dict(),
        "metadata": model.state_dict()._metadata,
        "optimizer": optimizer,
        "parameters": list(model.parameters()),
        "method": model.forward,
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_the_same_bytes(tmp_path, kind):
    model = _model(kind)
    optimizer = torch.optim.AdamW(model.parameters())
    # what a first step leaves on both
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    want = {name: _saved(thing) for name, thing in _things(model, optimizer).items()}
    with Recorder(model, optimizer, tmp_path / "r", level="full"):
        got = {name: _saved(thing) for name, thing in _things(model, optimizer).items()}
        assert len(model[3]._forward_hooks) > 0  # the recorder is there
    assert [name for name in want if want[name] != got[name]] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "make", [copy.deepcopy, copy.copy, AveragedModel, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_copy_has_the_hooks_of_the_program_alone(tmp_path, kind, make):
    model = _model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = [len(module._forward_hooks) for module in make(model).modules()]
    with Recorder(model, optimizer, tmp_path / "r") as recorder:
        twin = make(model)
        twin(torch.ones(2, 3))
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        recorder.step()
    if kind is not OwnCopy:  # its copies hold a function that does nothing
        assert [len(module._forward_hooks) for module in twin.modules()] == plain
    assert pickle.loads(pickle.dumps(twin)) is not None


def test_a_hooked_model_loads_with_weights_only(tmp_path):
    model = _model(OwnState)
    model[0]._forward_hooks.clear()
    with Recorder(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "r"):
        torch.save(model, tmp_path / "m.pt")
    allowed = [nn.Sequential, OwnState, nn.Dropout, nn.LayerNorm, nn.Linear]
    with torch.serialization.safe_globals(allowed):
        loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    assert torch.equal(loaded.eval()(torch.ones(1, 3)), model.eval()(torch.ones(1, 3)))


def _answer(model, queue):
    queue.put((len(model[3]._forward_hooks), float(model.eval()(torch.ones(1, 3)))))


@pytest.mark.slow  # starts a process
def test_a_hooked_model_goes_to_another_process(tmp_path):
    model = _model(nn.Linear)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with Recorder(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "r"):
        child = context.Process(target=_answer, args=(model, queue))
        child.start()
        hooks, answer = queue.get(timeout=120)
        child.join()
    assert hooks == 0 and answer == float(model.eval()(torch.ones(1, 3)))


def test_a_hook_that_the_program_adds_later_is_saved_and_can_be_removed(tmp_path):
    model = _model(nn.Linear)
    with Recorder(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "r"):
        handle = model[3].register_forward_pre_hook(_own_hook, with_kwargs=True)
        twin = pickle.loads(pickle.dumps(model))
        assert list(twin[3]._forward_pre_hooks.values()) == [_own_hook]
        assert list(twin[3]._forward_pre_hooks_with_kwargs) == [handle.id]
        handle.remove()
        assert not pickle.loads(pickle.dumps(model))[3]._forward_pre_hooks
