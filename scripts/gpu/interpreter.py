"""Triton's interpreter, in which kernels run where there is no GPU: what it must be mended for."""

from functools import cache
from typing import Any


@cache
def mend_interpreter() -> None:
    """Patch Triton 3.6's interpreter: it converts arrays of one element with `int`, which NumPy 2.4 refuses, and
    multiplies the bit patterns of bfloat16 numbers instead of their values."""
    import numpy
    from triton import language
    from triton.runtime import interpreter

    patch, product = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def wide(rows: Any) -> Any:
        if rows.dtype != language.bfloat16:
            return rows
        data = (rows.data.astype(numpy.uint32) << 16).view(numpy.float32)
        return interpreter.TensorHandle(data, language.float32)

    def wide_product(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        return product(self, wide(left), wide(right), *rest)

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = wide_product
