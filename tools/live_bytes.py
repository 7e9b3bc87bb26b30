"""Bytes of tensors as they come and go: on any device what an accelerator's allocator would count, exactly and every time the
same."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered. Tensors that were there before do not count, nor what a kernel takes within itself."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0  # the most at any time
        self.largest = 0  # tensor's storage
        self._known = WeakIdKeyDictionary()  # storages: those that count, and those from before

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        for storage in _storages((args, given)):
            self._known.setdefault(storage, None)
        made = func(*args, **given)
        for storage in _storages(made):
            if storage not in self._known:
                self._known[storage] = None
                weakref.finalize(storage, self._add, -storage.nbytes()).atexit = False
                self._add(storage.nbytes())
                self.largest = max(self.largest, storage.nbytes())
        return made

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def _storages(tree: Any) -> Iterator[UntypedStorage]:
    return (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
