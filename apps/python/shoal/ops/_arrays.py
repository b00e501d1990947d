"""Arrays of any library to and from what `_core` takes: (address, type, shape, strides in elements).

One place for the names of types, for who owns which memory, and for what is copied. Three kinds of arrays: numpy (with
`ml_dtypes` types, which its own DLPack export refuses), torch (which has no bfloat16 in numpy), and any other that
speaks DLPack or the array interface, whose results come back through its `asarray`.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
from typing import Any

import numpy as np

from shoal import _core
from shoal.errors import InvalidArgument, Unsupported

# Names that numpy (ml_dtypes) and torch share, where `_core` has another one. Packed float4 is bytes to every operator.
_CORE_NAMES = {"float8_e4m3fn": "float8e4m3fn", "float8_e8m0fnu": "float8e8m0", "float4_e2m1fn_x2": "uint8"}
_LIBRARY_NAMES = {"float8e4m3fn": "float8_e4m3fn", "float8e8m0": "float8_e8m0fnu"}
_ON_CPU = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost

View = tuple[int, str, tuple[int, ...], tuple[int, ...]]


class Array:
    """One array of the user, with the object that holds its memory."""

    __slots__ = ("holder", "itemsize", "kind", "name", "namespace", "original", "view", "writable")

    def __init__(self, op: str, name: str, value: Any) -> None:
        self.name = name
        self.original = value
        self.namespace: Any = None
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            self.kind = "torch"
            self._from_torch(op, value)
            return
        self.kind = "numpy"
        if not isinstance(value, np.ndarray | np.generic):
            self.kind = type(value).__module__.partition(".")[0]
            value = self._import(op, value)
        self._from_numpy(op, np.asarray(value))

    def _import(self, op: str, value: Any) -> np.ndarray:
        _refuse_other_devices(op, self.name, value)
        if hasattr(value, "__array_namespace__"):
            self.namespace = value.__array_namespace__()
        if hasattr(value, "__dlpack__"):
            try:
                return np.from_dlpack(value)
            except (BufferError, RuntimeError, TypeError, ValueError):
                pass  # a type that DLPack or numpy lacks: the array interface below
        if hasattr(value, "__array_interface__"):
            return np.asarray(value)
        if hasattr(value, "__array__"):
            array = np.asarray(value).view()
            array.flags.writeable = False  # it may be a copy
            return array
        raise InvalidArgument(f"{op}: {self.name} is of type {type(value).__name__}, expected an array")

    def _from_numpy(self, op: str, array: np.ndarray) -> None:
        dtype, itemsize, native = _numpy_type(array.dtype)
        if dtype == "float4_e2m1fn":
            array, dtype = _packed_nibbles(op, self.name, array), "uint8"
        if not native or (not array.flags.c_contiguous and any(stride % itemsize for stride in array.strides)):
            array = array.astype(array.dtype.newbyteorder("="), order="C")  # a copy, so not writable to the user
            self.writable = False
        else:
            self.writable = bool(array.flags.writeable)
        self.holder: Any = array
        self.itemsize = itemsize
        strides = tuple(stride // itemsize for stride in array.strides)
        self.view: View = (array.__array_interface__["data"][0], dtype, array.shape, strides)

    def _from_torch(self, op: str, tensor: Any) -> None:
        if tensor.device.type != "cpu":
            raise _no_device(op, self.name, str(tensor.device))
        if str(tensor.layout) != "torch.strided":
            raise InvalidArgument(f"{op}: {self.name} has layout {tensor.layout}, expected a strided tensor")
        self.holder = tensor
        self.writable = True
        self.itemsize = tensor.element_size()
        name = _core_name(str(tensor.dtype).removeprefix("torch."))
        self.view = (tensor.data_ptr(), name, tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def aligned(self) -> bool:
        return self.view[0] % self.itemsize == 0

    @property
    def inner_contiguous(self) -> bool:
        _, _, shape, strides = self.view
        return not shape or shape[-1] <= 1 or strides[-1] == 1

    @property
    def contiguous(self) -> bool:
        _, _, shape, strides = self.view
        expected = 1
        for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
            if extent == 0:
                return True
            if extent != 1 and stride != expected:
                return False
            expected *= extent
        return True

    @property
    def self_overlapping(self) -> bool:
        _, _, shape, strides = self.view
        return 0 not in shape and any(extent > 1 and stride == 0 for extent, stride in zip(shape, strides, strict=True))

    def extent(self) -> tuple[int, int]:
        """The first byte and the byte behind the last one; equal if there is no element."""
        address, _, shape, strides = self.view
        if 0 in shape:
            return (address, address)
        steps = [(extent - 1) * stride * self.itemsize for extent, stride in zip(shape, strides, strict=True)]
        low = address + sum(step for step in steps if step < 0)
        return (low, address + sum(step for step in steps if step > 0) + self.itemsize)

    def make_contiguous(self) -> None:
        """Replaces the memory by a copy in row-major order, aligned."""
        if self.kind == "torch":
            self.holder = self.holder.detach().clone(memory_format=sys.modules["torch"].contiguous_format)
            self.view = (self.holder.data_ptr(), *self.view[1:3], tuple(self.holder.stride()))
            return
        copy = np.empty(self.holder.shape, self.holder.dtype)
        copy[...] = self.holder
        self.holder = copy
        strides = tuple(stride // self.itemsize for stride in copy.strides)
        self.view = (copy.__array_interface__["data"][0], *self.view[1:3], strides)

    def assign(self, other: Array) -> None:
        """Writes the values of `other`, an array of the same kind, shape and type."""
        if self.kind == "torch":
            with sys.modules["torch"].no_grad():
                self.holder.copy_(other.holder)
        else:
            self.holder[...] = other.holder

    def empty(self, op: str, name: str, core_name: str, shape: tuple[int, ...]) -> Array:
        """A new array of this one's kind; `original` of it is what the user gets (`finished`)."""
        library_name = _LIBRARY_NAMES.get(core_name, core_name)
        if self.kind == "torch":
            torch = sys.modules["torch"]
            return Array(op, name, torch.empty(shape, dtype=getattr(torch, library_name)))
        array = Array(op, name, np.empty(shape, _numpy_dtype(library_name)))
        array.kind, array.namespace = self.kind, self.namespace
        return array

    def finished(self) -> Any:
        """The array for the user: this library's own, also where numpy stood in for it."""
        if self.namespace is not None and isinstance(self.original, np.ndarray):
            return self.namespace.asarray(self.original)
        return self.original


def host_array(op: str, name: str, value: Any) -> Array:
    """A small input that is read on the host: an int, a list of ints or an array, as int32."""
    if hasattr(value, "__dlpack__") or hasattr(value, "__array_interface__") or hasattr(value, "__array__"):
        array = Array(op, name, value)
        if array.view[1] != "int64":
            return array
        values = array.holder.numpy() if array.kind == "torch" else array.holder
    else:
        try:
            values = np.array(
                [operator.index(v) for v in value] if isinstance(value, list | tuple) else operator.index(value)
            )
        except TypeError:
            raise InvalidArgument(
                f"{op}: {name} is of type {type(value).__name__}, expected an int or a small array of int32"
            ) from None
    if values.dtype == object or np.any(values != values.astype(np.int32)):
        raise InvalidArgument(f"{op}: {name} does not fit into 32 bits")
    return Array(op, name, values.astype(np.int32))


def type_name(op: str, name: str, value: Any) -> Any:
    """The name of an element type given as a str, a numpy or a torch dtype."""
    if isinstance(value, str):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        return _core_name(str(value).removeprefix("torch."))
    try:
        return _core_name(np.dtype(value).name)
    except TypeError:
        raise InvalidArgument(f"{op}: {name} is of type {type(value).__name__}, expected the name of a type") from None


def check_one_kind(op: str, arrays: list[Array]) -> None:
    for array in arrays[1:]:
        if array.kind != arrays[0].kind:
            raise InvalidArgument(
                f"{op}: {array.name} is of {array.kind} and {arrays[0].name} of {arrays[0].kind}, "
                "expected arrays of one library"
            )


def _core_name(library_name: str) -> str:
    return _CORE_NAMES.get(library_name, library_name)


@functools.lru_cache(maxsize=64)
def _numpy_type(dtype: np.dtype) -> tuple[str, int, bool]:
    """(name, bytes, native byte order): numpy makes the name anew every time, which took a fifth of a small call."""
    return _core_name(dtype.name), max(1, dtype.itemsize), dtype.isnative  # 0 bytes: an empty text


def _numpy_dtype(library_name: str) -> np.dtype:
    try:
        return np.dtype(library_name)
    except TypeError:
        try:
            return np.dtype(getattr(importlib.import_module("ml_dtypes"), library_name))
        except ImportError:
            raise Unsupported(f"numpy arrays of {library_name} need the package ml_dtypes") from None


def _no_device(op: str, name: str, device: str) -> Unsupported:
    reason = "shoal.ops runs on the CPU" if _core.has_cuda else "this build has no CUDA"
    return Unsupported(f"{op}: {name} is on the device {device}: {reason}")


def _refuse_other_devices(op: str, name: str, value: Any) -> None:
    if hasattr(value, "__dlpack_device__"):
        device: tuple[int, int] = value.__dlpack_device__()
        if int(device[0]) not in _ON_CPU:
            label = f"cuda:{device[1]}" if int(device[0]) == 2 else f"{int(device[0])}:{device[1]} of DLPack"
            raise _no_device(op, name, label)
    elif hasattr(value, "__cuda_array_interface__"):
        raise _no_device(op, name, "cuda")


def _packed_nibbles(op: str, name: str, array: np.ndarray) -> np.ndarray:
    """Values of ml_dtypes.float4_e2m1fn, one a byte, as two a byte, the even one low."""
    if array.ndim == 0 or array.shape[-1] % 2 != 0:
        raise InvalidArgument(f"{op}: {name} has shape {list(array.shape)}, expected an even number of float4 in a row")
    codes = array.view(np.uint8) & 15
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    packed.flags.writeable = False
    return packed
