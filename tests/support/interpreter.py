"""Patches that make Triton's interpreter faster, and more like a GPU.

At every call of a device function, also of `tl.sum`, the interpreter searches Triton's language for
everything that it must replace, and after the first call finds it replaced. With the patch it
searches once per module, and leaves the replacement in place.

After every sum, difference and product of 32 bits it computes the same in 64 bits, for an assertion
that only `debug` would make. With the patch it does not. It also remembers which type of NumPy
stands for which type of Triton, which it finds by a table that it makes each time, which type an
operation of two types has, and what each tensor has of its type: a shape, element by element. All
that took most of our kernels' tests' time.
"""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from padded_dispatch.utils.phases import unseen


def patch_interpreter() -> None:
    """Install the patches: after TRITON_INTERPRET is set, before a kernel runs."""
    _patch_modules_once()
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _convert_bools()
    _convert_e4m3()
    _remember_types()
    _remember_shapes()
    # As on a GPU, torch's dispatch modes see nothing of a kernel: not how its arguments are copied.
    interpreter.GridExecutor.__call__ = unseen()(interpreter.GridExecutor.__call__)


def _patch_modules_once() -> None:
    patch: Callable[[Callable[..., Any]], Any] = interpreter._patch_lang
    patched: set[str] = set()

    def patch_new(fn: Callable[..., Any]) -> SimpleNamespace:
        if fn.__module__ not in patched:
            patch(fn)
            patched.add(fn.__module__)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_new


def _convert_bools() -> None:
    """Let a kernel have a bool as its argument, which Triton's interpreter refuses up to 3.7."""
    convert: Callable[[Any], Any] = interpreter._implicit_cvt

    def converted(given: Any) -> Any:
        if not isinstance(given, bool):
            return convert(given)
        handle = interpreter.TensorHandle(np.array([given]), core.int1)
        return core.tensor(handle, core.int1)

    interpreter._implicit_cvt = converted


def _convert_e4m3() -> None:
    """Let torch convert to and from e4m3: the interpreter's rounding carries into no exponent."""
    convert: Callable[..., Any] = interpreter._convert_float
    types = {"fp32": torch.float32, "fp16": torch.float16, "fp8e4nv": torch.float8_e4m3fn}

    def converted(data: Any, given: Any, wanted: Any, mode: Any) -> Any:
        if "fp8e4nv" not in (given.name, wanted.name):
            return convert(data, given, wanted, mode)
        bits = np.dtype(f"uint{given.primitive_bitwidth}")
        value = torch.from_numpy(np.ascontiguousarray(data).view(bits)).view(types[given.name])
        bits = getattr(torch, f"uint{wanted.primitive_bitwidth}")
        return value.to(types[wanted.name]).view(bits).numpy()

    interpreter._convert_float = converted


def _remember_types() -> None:
    type_of: Callable[[Any], Any] = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def remembered(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = type_of(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = remembered
    result_of: Callable[..., Any] = TritonSemantic.computation_type_impl
    results: dict[Any, Any] = {}

    def result(semantic: Any, one: Any, is_scalar: bool, other: Any, *how: bool) -> Any:
        key = one.name, is_scalar, other.name, *how
        if key not in results:
            results[key] = result_of(semantic, one, is_scalar, other, *how)
        return results[key]

    TritonSemantic.computation_type_impl = result


def _remember_shapes() -> None:
    make_type: Callable[..., None] = core.block_type.__init__
    make_tensor: Callable[..., None] = core.tensor.__init__
    known: dict[Any, dict[str, Any]] = {}

    def init_type(made: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in known:
            make_type(made, element_ty, shape)
            known[key] = vars(made) | {"of_tensors": {}}
        vars(made).update(known[key])

    def init_tensor(made: Any, handle: Any, type: Any) -> None:
        of_tensors = vars(type).setdefault("of_tensors", {})
        if not of_tensors:
            make_tensor(made, handle, type)
            of_tensors.update(vars(made))
        vars(made).update(of_tensors, handle=handle, type=type)

    core.block_type.__init__ = init_type
    core.tensor.__init__ = init_tensor
