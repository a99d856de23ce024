"""Progress bars of transformers while it reads weights: counted as tensors of the current stage, not drawn."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import modeling_gguf_pytorch_utils
from transformers.utils.logging import EmptyTqdm, set_tqdm_hook

from outpace.lib.stages import advance, is_loading, restart


class _Counted(EmptyTqdm):  # type: ignore[misc]  # transformers has no types for it
    """An iterable in place of a bar."""

    def __init__(self, items: Collection[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(items)  # type: ignore[no-untyped-call]
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        restart(len(self._items))
        for item in self._items:
            yield item
            advance()


def _bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The library's own bar where this thread loads nothing by this package, or where it iterates over nothing."""
    is_counted = is_loading() and args and isinstance(args[0], Collection)
    return _Counted(*args) if is_counted else factory(*args, **kwargs)


@contextmanager
def counted_bars() -> Iterator[None]:
    """Count tensors that transformers reads. Its reader of GGUF files has a bar that no hook reaches."""
    gguf: Any = modeling_gguf_pytorch_utils
    before, stock = set_tqdm_hook(_bar), gguf.tqdm
    gguf.tqdm = lambda *args, **kwargs: _bar(stock, args, kwargs)
    try:
        yield
    finally:
        set_tqdm_hook(before)
        gguf.tqdm = stock
