"""A CUDA device that this machine does not have: its tensors say `cuda:0`, their numbers lie on the CPU.

PyTorch's FakeTensorMode knows devices but no numbers. Here every operator is computed on the CPU, so
that a record or a replay can be compared with that of the CPU, and four things are held as strictly as
by a device: tensors of two devices do not meet in one operator; memory has no address; a copy to pinned
memory that waits for nothing holds NaN until an event recorded after it is waited for; what makes the
host wait (`.item()`, `nonzero`, a Boolean mask, a copy that blocks) is noted, with the line that asked.
It says nothing of kernels, speed, streams or memory.
"""

import contextlib
import copy
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from stabilitylab.probe import params, slots, updates

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
aten = torch.ops.aten
WAITING = {  # operators whose result's size or value the host has to know
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2, aten.unique_dim,
    aten.unique_consecutive, aten.bincount, aten.is_nonzero, aten.isin, aten._linalg_check_errors,
}  # fmt: skip
COPIES = {aten.copy_, aten._to_copy}
SHAPED = {aten.squeeze_, aten.unsqueeze_, aten.t_, aten.transpose_}  # change the shape in place
TOGETHER = {aten.cat, aten.stack}  # take no CPU scalar


class Shadow(torch.Tensor):
    "A tensor of the device: `host` are its numbers."

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor, needs_grad: bool = False):
        "Of numbers on the CPU, which it shares."
        meta = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device="meta")
        # PyTorch's own code takes it for a meta tensor: without CUDA it ends where it asks for a device
        made = torch.Tensor._make_subclass(cls, meta, needs_grad, device_for_backend_keys=CUDA)
        made.host = host
        return made

    device, is_cuda, is_meta, is_cpu = CUDA, True, False, False

    def get_device(self) -> int:
        "The number of the device."
        return 0

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        "As of any tensor: itself where nothing changes."
        others = {name: value for name, value in kwargs.items() if name != "copy"}
        to = torch._C._nn._parse_to(*args, **others)
        stays = to[0] in (None, CUDA, torch.device("cuda")) and to[1] in (None, self.dtype)
        if stays and not kwargs.get("copy"):
            return self
        return super().to(*args, **kwargs)

    def cuda(self, *_: Any, **__: Any) -> torch.Tensor:
        "It is there."
        return self

    @property
    def data(self) -> torch.Tensor:
        "The same numbers without a graph."
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, new)
        self.host = new.host

    def data_ptr(self) -> int:
        "No host program reads a device's memory."
        raise RuntimeError("the address of a device's memory was asked for on the host")

    def numpy(self, **_: Any) -> Any:
        "As of any CUDA tensor."
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def tolist(self) -> Any:
        "Waits for the device."
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        "Its numbers again, with its gradient."
        if id(self) not in memo:
            made = Shadow(self.host.clone(), self.requires_grad)
            made._is_param = getattr(self, "_is_param", False)
            made.__dict__.update(
                {
                    k: copy.deepcopy(v, memo)
                    for k, v in self.__dict__.items()
                    if k not in ("host", "_is_param")
                }
            )
            made.grad = None if self.grad is None else copy.deepcopy(self.grad, memo)
            memo[id(self)] = made
        return memo[id(self)]

    def __reduce_ex__(self, protocol: int) -> tuple:
        return _from_host, (self.cpu().detach(), self.requires_grad)

    def __format__(self, spec: str) -> str:
        "Waits for the device."
        return format(self.item(), spec) if not self.ndim else repr(self)

    def __repr__(self, **_: Any) -> str:
        return f"Shadow({self.host!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return DEVICE.run(func, args, kwargs or {})


def _from_host(host: torch.Tensor, needs_grad: bool) -> Shadow:
    "A tensor as it was pickled."
    return Shadow(host, needs_grad)


class Event:
    "An event of the one stream: everything that was asked for before it."

    def __init__(self, **_: Any):
        self.at = 0

    def record(self, stream: Any = None) -> None:
        "After what was asked for so far."
        self.at = len(DEVICE.copies)

    def synchronize(self) -> None:
        "Wait until it has come."
        DEVICE.arrive(self.at)

    def query(self) -> bool:
        "Whether it has come; never at once."
        return all(copy is None for copy in DEVICE.copies[: self.at])


class Device:
    "The state of the one device."

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        "As it begins."
        self.waits: list[str] = []  # who made the host wait, and by which operator
        self.copies: list[tuple | None] = []  # to pinned memory, under way
        self.pinned: set[int] = set()  # storages
        self.n_operators = 0

    def arrive(self, n: int | None = None) -> None:
        "The first `n` copies, or all, have arrived."
        for i, pair in enumerate(self.copies[:n]):
            if pair is not None:
                target, numbers = pair
                target.copy_(numbers)
                self.copies[i] = None

    def wait(self, func: Any) -> None:
        "The host waits for everything."
        frames = [frame for frame in traceback.extract_stack() if "/stabilitylab/" in frame.filename]
        place = (
            f"{frames[-1].filename.rsplit('/stabilitylab/')[-1]}:{frames[-1].lineno}"
            if frames
            else "elsewhere"
        )
        self.waits.append(f"{func} by {place}")
        self.arrive()

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        "An operator of which one argument, or the result, lies on the device."
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        shadows = [tensor for tensor in tensors if isinstance(tensor, Shadow)]
        asked = kwargs.get("device")
        target = torch.device(asked) if asked is not None else CUDA if shadows else CPU
        target = (
            CUDA if target.type == "meta" else target
        )  # asked by PyTorch's own code, as a mask for attention
        packet = func.overloadpacket
        self.n_operators += bool(shadows)
        if packet is aten.copy_:
            return self._copy(
                args[0], args[1], kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            )
        if packet is aten._to_copy and bool(shadows) != (target.type == "cuda"):
            return self._moved(func, args[0], kwargs, target)
        if shadows:
            self._check(func, packet, tensors, args)
        plain = [leaf.host if isinstance(leaf, Shadow) else leaf for leaf in leaves]
        plain_args, plain_kwargs = tree_unflatten(plain, spec)
        is_pinned = plain_kwargs.pop("pin_memory", False)
        if asked is not None:
            plain_kwargs["device"] = CPU
        out = func(*plain_args, **plain_kwargs)
        if is_pinned:
            self.pinned.add(out.untyped_storage()._cdata)
        if target.type != "cuda":
            return out
        if packet in SHAPED:
            with no_dispatch():
                func(*args, **kwargs)
        known = {id(tensor.host): tensor for tensor in shadows}
        return tree_map_only(
            torch.Tensor, lambda made: known[id(made)] if id(made) in known else Shadow(made), out
        )

    def _check(self, func: Any, packet: Any, tensors: list, args: tuple) -> None:
        "Tensors of two devices do not meet; what makes the host wait is noted."
        others = [t for t in tensors if not isinstance(t, Shadow) and (t.ndim or packet in TOGETHER)]
        is_index = packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
        if others and not is_index:
            shapes = [tuple(other.shape) for other in others]
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {func} got cpu tensors of {shapes}"
            )
        masks = is_index and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if packet in WAITING or masks or (is_index and others):
            self.wait(func)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, is_async: bool) -> torch.Tensor:
        "One tensor into another, between devices or on one."
        crosses = isinstance(target, Shadow) != isinstance(source, Shadow)
        numbers = getattr(source, "host", source)
        if not crosses:
            getattr(target, "host", target).copy_(numbers)
        elif isinstance(target, Shadow):
            if not is_async:
                self.wait("copy_ to the device")
            target.host.copy_(numbers)
        elif is_async and target.untyped_storage()._cdata in self.pinned:
            self.copies.append((target, numbers.clone()))
            target.fill_(float("nan") if target.is_floating_point() else 77)
        else:
            self.wait("copy_ to the host")
            target.copy_(numbers)
        return target

    def _moved(self, func: Any, source: torch.Tensor, kwargs: dict, target: torch.device) -> torch.Tensor:
        "A tensor on the other device."
        is_waiting = target.type == "cpu" or not kwargs.get("non_blocking")
        if is_waiting:
            self.wait(f"{func} to {target}")
        rest = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking")}
        moved = func(getattr(source, "host", source), device=CPU, **rest)
        moved = moved.clone() if moved is getattr(source, "host", source) else moved
        return Shadow(moved) if target.type == "cuda" else moved


DEVICE = Device()


class _Mode(TorchDispatchMode):
    "Makes the tensors that are asked for on the device."

    def __init__(self):
        super().__init__()
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE  # so that PyTorch does not look for a driver

    @classmethod
    def is_infra_mode(cls) -> bool:
        "Held in PyTorch's own slot."
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return DEVICE.run(func, args, kwargs or {})


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    "The recorder passes by tensors of other people's classes, and does not pass by these in the block."

    def readable(tensor: torch.Tensor) -> torch.Tensor:
        "What the statistics read."
        tensor = slots.local(tensor).detach()
        return tensor.abs() if tensor.is_complex() else tensor

    with contextlib.ExitStack() as stack:
        for module in (slots, params, updates):
            stack.enter_context(mock.patch.object(module, "readable", readable))
        yield


@contextlib.contextmanager
def device() -> Iterator[Device]:
    "`cuda:0` is there in the block; what it saw."
    DEVICE.reset()
    torch._C._ensureCUDADeviceGuardSet()
    lifts, overwrites = (
        torch._C._only_lift_cpu_tensors(),
        torch.__future__.get_overwrite_module_params_on_conversion(),
    )
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    events = mock.patch.multiple(
        "torch.cuda",
        Event=Event,
        current_stream=lambda *_: None,
        synchronize=lambda *_: DEVICE.wait("synchronize"),
        get_rng_state=lambda *_: torch.get_rng_state(),  # the device draws from the generator of the CPU
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
    )
    no_autocast = mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    bf16 = mock.patch("torch.cuda.is_bf16_supported", lambda *_, **__: True)
    try:
        with events, no_autocast, bf16, _readable(), _Mode():
            yield DEVICE
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
