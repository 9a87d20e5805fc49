"""Remember what is expensive to make, up to a size, for many threads."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

V = TypeVar("V")
_KEPT_ANYWAY = 2
_MOST = 4096


class _Slot(Generic[V]):
    """One value, made by the first thread that asks for it; the others wait for that thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.value: V | None = None
        self.refusal: tuple[type[Exception], tuple[Any, ...]] | None = None
        self.size = 0.0


class Memo(Generic[V]):
    """Values by key, the least recently used ones dropped first; at most 4096 of them.

    Parameters
    ----------
    budget : what all kept values together may weigh; the last two are kept whatever they weigh.
    weigh : weight of one value, in the same unit.
    refusals : exceptions that are remembered like values and raised again; all others are forgotten.
    """

    def __init__(self, budget: float, weigh: Callable[[V], float], refusals: tuple[type[Exception], ...] = ()) -> None:
        self._budget, self._weigh, self._refusals = budget, weigh, refusals
        self._slots: OrderedDict[Hashable, _Slot[V]] = OrderedDict()
        self._lock = threading.Lock()
        self._total = 0.0

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key; ``make`` is called once for it as long as it is kept."""
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            self._slots.move_to_end(key)
            if len(self._slots) > _MOST:
                self._drop()
        with slot.lock:
            if slot.refusal is not None:
                kind, arguments = slot.refusal
                raise kind(*arguments)
            if slot.value is None:
                try:
                    slot.value = make()
                except self._refusals as error:
                    slot.refusal = (type(error), error.args)
                    raise
                except BaseException:
                    with self._lock:
                        self._slots.pop(key, None)
                    raise
                self._count(key, slot)
            return slot.value

    def _count(self, key: Hashable, slot: "_Slot[V]") -> None:
        assert slot.value is not None
        slot.size = self._weigh(slot.value)
        with self._lock:
            if self._slots.get(key) is not slot:
                return  # dropped while it was made
            self._total += slot.size
            while self._total > self._budget and len(self._slots) > _KEPT_ANYWAY:
                self._drop()

    def _drop(self) -> None:
        self._total -= self._slots.popitem(last=False)[1].size
