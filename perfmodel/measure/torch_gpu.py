"""A GPU by PyTorch, behind the interface of `perfmodel.measure.gpu`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

#: Weights on the GPU, far more than its caches hold, and the share of its free memory that they may take.
_POOL_BYTES, _SHARE = 2 * 2**30, 0.5
#: A pass of kernels takes about so long [s], and has at most so many.
_PASS_S, _MOST = 2e-3, 2000
_LAUNCHES = 1000


class TorchDevice:
    """The first CUDA (or ROCm) device."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        torch.cuda.init()
        self._device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self._device)
        self.name = str(properties.name)
        self.memory_bytes = float(properties.total_memory)
        free, _ = torch.cuda.mem_get_info(self._device)
        size = int(min(_POOL_BYTES, _SHARE * free)) // 4
        self._pool = torch.ones(size, dtype=torch.float32, device=self._device)
        self._tiny = torch.zeros(1, device=self._device)
        self._next = 0
        self._host: dict[tuple[int, bool], Any] = {}

    def read(self, size: int) -> float:
        """See `perfmodel.measure.gpu.Device`."""
        return self._kernels(lambda: self._torch.sum(self._part(size // 4)), size)

    def gemv(self, rows: int, cols: int) -> float:
        """See `perfmodel.measure.gpu.Device`."""
        token = self._torch.ones(cols, dtype=self._torch.float16, device=self._device)
        out = self._torch.empty(rows, dtype=self._torch.float16, device=self._device)

        def product() -> Any:
            weights = self._part(rows * cols // 2).view(self._torch.float16).view(rows, cols)
            return self._torch.mv(weights, token, out=out)

        return self._kernels(product, 2 * rows * cols)

    def launch(self) -> float:
        """See `perfmodel.measure.gpu.Device`."""
        return self._events(lambda: self._tiny.add_(0.0), _LAUNCHES)

    def synchronise(self) -> float:
        """See `perfmodel.measure.gpu.Device`."""

        def work() -> None:
            self._tiny.add_(0.0)
            self._torch.cuda.synchronize()

        return self._wall(work)

    def copy(self, size: int, pinned: bool) -> float:
        """See `perfmodel.measure.gpu.Device`."""
        key = (size, pinned)
        if key not in self._host:
            self._host[key] = self._torch.ones(size, dtype=self._torch.uint8, pin_memory=pinned)
        source, target = self._host[key], self._part(max(size // 4, 1)).view(self._torch.uint8)[:size]

        def work() -> None:
            target.copy_(source, non_blocking=pinned)
            self._torch.cuda.synchronize()

        return self._wall(work)

    def _part(self, size: int) -> Any:
        """The next so many numbers of the pool."""
        if self._next + size > self._pool.numel():
            self._next = 0
        start = self._next
        self._next += (size + 63) // 64 * 64  # kernels want aligned matrices
        return self._pool[start : start + size]

    def _kernels(self, work: Callable[[], object], size: int) -> float:
        # At 1 TB/s; a faster GPU has shorter passes.
        return self._events(work, max(8, min(_MOST, int(_PASS_S * 1e12 / size))))

    def _events(self, work: Callable[[], object], repeats: int) -> float:
        """Time on the GPU of one of many pieces of work, one behind the other."""
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._torch.cuda.synchronize()
        work()
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3 / repeats

    def _wall(self, work: Callable[[], object]) -> float:
        self._torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin


def find_gpu() -> tuple[TorchDevice | None, str]:
    """The GPU, or None and why there is none."""
    try:
        import torch
    except (ImportError, OSError):
        return None, "PyTorch is not installed"
    if not torch.cuda.is_available():
        return None, "PyTorch finds no GPU"
    try:
        return TorchDevice(torch), ""
    except RuntimeError as error:
        return None, f"the GPU cannot be used ({' '.join(str(error).split())[:200]})"
