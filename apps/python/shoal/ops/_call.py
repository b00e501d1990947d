"""One call of an operator: arguments by name in, outputs in order out.

What an operator has (inputs, attributes, outputs, what it changes in place) is told by `_core.ops.operators()`; the
functions of this package only carry the signatures and their documentation. Plain calls on numpy arrays take a short
way through `_core.ops.call_plain`; the long one below knows every array, layout and `out=`, and what to say of them.
"""

from __future__ import annotations

from typing import Any

from shoal import _core
from shoal.errors import InvalidArgument
from shoal.ops._arrays import Array, check_one_kind, host_array, type_name

_OPERATORS: dict[str, dict[str, Any]] = _core.ops.operators()


class _Prepared:
    """A checked call: nothing has been written yet."""

    def __init__(self, op: str, arguments: dict[str, Any]) -> None:
        self.op = op
        self.spec = _OPERATORS[op]
        self.arrays: dict[str, Array] = {}
        attributes: dict[str, Any] = {}
        for name, use in self.spec["uses"].items():
            value = arguments[name]
            if use == "attribute":
                attributes[name] = type_name(op, name, value) if name == "dtype" and value is not None else value
            elif value is not None:
                self.arrays[name] = host_array(op, name, value) if use == "host" else Array(op, name, value)
        self.ordinary = [a for name, a in self.arrays.items() if self.spec["uses"][name] != "host"]
        if not self.ordinary:
            raise InvalidArgument(f"{op}: {next(iter(self.spec['uses']))} is required")
        self.outs = self._given_outputs(arguments.get("out"))
        check_one_kind(op, [*self.ordinary, *(out for out in self.outs if out is not None)])
        for name, array in self.arrays.items():
            self._lay_out(array, self.spec["uses"][name])
        inputs = {name: array.view for name, array in self.arrays.items()}
        self.call = _core.ops.prepare(op, inputs, attributes, self.arrays)
        self.wanted = self.call.outputs()
        self._check_overlaps()
        self._check_outputs()

    def _check_overlaps(self) -> None:
        for changed in self.arrays.values():
            if self.spec["uses"][changed.name] == "in_place":
                low, high = changed.extent()
                for other in self.arrays.values():
                    other_low, other_high = other.extent()
                    if other is not changed and low < other_high and other_low < high:
                        raise InvalidArgument(
                            f"{self.op}: {changed.name} is changed in place and shares memory with {other.name}"
                        )

    def _given_outputs(self, out: Any) -> list[Array | None]:
        names = self.spec["outputs"]
        values = [None] if out is None else list(out) if isinstance(out, tuple | list) else [out]
        if len(values) > len(names):
            raise InvalidArgument(
                f"{self.op}: out has {len(values)} entries, expected at most {len(names)}: {', '.join(names)}"
            )
        values += [None] * (len(names) - len(values))
        return [
            None if value is None else Array(self.op, f"out ({name})", value)
            for name, value in zip(names, values, strict=True)
        ]

    def _lay_out(self, array: Array, use: str) -> None:
        if use == "in_place":
            # A copy would keep the change from the caller.
            if not array.writable:
                raise InvalidArgument(
                    f"{self.op}: {array.name} is read-only or oddly strided, expected memory to change in place"
                )
            if array.self_overlapping:
                raise InvalidArgument(
                    f"{self.op}: {array.name} has elements that share memory, expected one place for each"
                )
        elif (
            not array.aligned
            or (use == "contiguous" and not array.contiguous)
            or (use == "inner" and not array.inner_contiguous)
        ):
            array.make_contiguous()

    def _check_outputs(self) -> None:
        for out, wanted, alias in zip(self.outs, self.wanted, self.spec["aliases"], strict=True):
            if out is None:
                continue
            if wanted is None:
                raise InvalidArgument(f"{self.op}: {out.name} is given, but this call has no such output")
            dtype, shape = wanted
            if out.view[1] != dtype:
                raise InvalidArgument(f"{self.op}: {out.name} has type {out.view[1]}, expected {dtype}")
            if tuple(out.view[2]) != tuple(shape):
                raise InvalidArgument(f"{self.op}: {out.name} has shape {list(out.view[2])}, expected {list(shape)}")
            if not out.writable:
                raise InvalidArgument(
                    f"{self.op}: {out.name} is read-only or has odd strides, expected writable memory"
                )
            if out.self_overlapping:
                raise InvalidArgument(
                    f"{self.op}: {out.name} has elements that share memory, expected one place for each"
                )
            changed = self._changed(alias, wanted)
            if changed is not None and out.view != changed.view:
                raise InvalidArgument(f"{self.op}: {out.name} is other memory than {alias}, expected {alias} itself")

    def _changed(self, alias: str, wanted: Any) -> Array | None:
        """The input whose memory this output is. A cache without room is not changed: the output is a new array."""
        array = self.arrays.get(alias)
        if array is None or self.spec["uses"][alias] != "in_place" or tuple(array.view[2]) != tuple(wanted[1]):
            return None
        return array

    def _works_in(self, out: Array, state: Array | None, taken: list[Array]) -> bool:
        """Whether the operator may write into this memory at once; otherwise the result is copied there at the end."""
        if not out.aligned or not (self.spec["strided_outputs"] or out.contiguous):
            return False
        low, high = out.extent()
        for other in taken:
            if other is state and other.view == out.view:
                continue
            other_low, other_high = other.extent()
            if low < other_high and other_low < high:
                return False
        return True

    def run(self) -> Any:
        given = list(self.arrays.values())
        memory: list[Array | None] = []
        results: list[Any] = []
        copies: list[tuple[Array, Array]] = []
        like = self.ordinary[0]
        for name, out, wanted, alias in zip(
            self.spec["outputs"], self.outs, self.wanted, self.spec["aliases"], strict=True
        ):
            if wanted is None or (out is None and name in self.spec["on_request"]):
                memory.append(None)
                results.append(None)
                continue
            changed = self._changed(alias, wanted)
            if changed is not None:
                memory.append(changed)
                results.append(changed.original)
                continue
            if out is not None and self._works_in(out, self.arrays.get(alias), given):
                target = out
            else:
                target = like.empty(self.op, name, *wanted)
                if out is not None:
                    copies.append((out, target))
            given.append(target)
            memory.append(target)
            results.append(target if out is None else out.original)
        self.call.run(self.op, [None if a is None else a.view for a in memory], list(self.spec["outputs"]))
        for out, target in copies:
            out.assign(target)
        outputs = [r.finished() if isinstance(r, Array) else r for r in results]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def call(op: str, arguments: dict[str, Any]) -> Any:
    outputs = _core.ops.call_plain(op, arguments)
    return _Prepared(op, arguments).run() if outputs is NotImplemented else outputs


def describe_variant(op: str, arguments: dict[str, Any]) -> str:
    """For `explain`: checks the call and runs nothing."""
    _Prepared(op, arguments)
    chosen = _core.ops.default_isa()
    passed_over = ["cuda: this build has no CUDA" if not _core.has_cuda else "cuda: shoal.ops runs on the CPU"]
    isas = _core.ops.isas()
    for isa in reversed(_core.ops.KNOWN_ISAS):
        if isa == chosen:
            break
        passed_over.append(
            f"cpu {isa}: " + ("SHOAL_CPU_ISA asks for another" if isa in isas else "not in this processor or build")
        )
    return f"{op}: cpu {chosen}; passed over: {'; '.join(passed_over)}"
