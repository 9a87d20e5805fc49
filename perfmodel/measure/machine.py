"""What the operating system says of the machine: its processor, its memory, and the libraries that run on it."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
from pathlib import Path
from typing import NamedTuple

#: Assumed where the system does not say [byte].
_LAST_CACHE, _MEMORY = 64 * 2**20, 4 * 10**9


class Machine(NamedTuple):
    """The machine that measures itself.

    cpu : model of the processor as it names itself. sockets, cores : physical ones that this process may use.
    cache_bytes : all of the last caches that it may use together [byte]. memory_bytes, free_bytes : [byte].
    blas : library of NumPy's products, and its kernels; empty where its threads cannot be set.
    python, numpy, numba : versions. date : of today, ISO 8601.
    """

    cpu: str
    sockets: int
    cores: int
    cache_bytes: int
    memory_bytes: int
    free_bytes: int
    blas: str
    python: str
    numpy: str
    numba: str
    date: str

    @property
    def versions(self) -> str:
        """What the times were measured with, and where and when, for a citation."""
        blas = self.blas or "a BLAS library whose threads cannot be set"
        return (
            f"{blas}, NumPy {self.numpy}, Numba {self.numba}, Python {self.python}, on {self.cpu}"
            f" ({self.cores} cores), {self.date}"
        )


def find_machine() -> Machine:
    """This machine."""
    import numba
    import numpy as np

    allowed = _allowed_cpus()
    sockets, cores = _cores(_read("/proc/cpuinfo"), allowed)
    memory, free = _memory(_read("/proc/meminfo"))
    return Machine(
        cpu=_model_name(_read("/proc/cpuinfo")),
        sockets=sockets,
        cores=cores,
        cache_bytes=_last_cache(allowed),
        memory_bytes=memory,
        free_bytes=free,
        blas=_blas(),
        python=platform.python_version(),
        numpy=np.__version__,
        numba=numba.__version__,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def _read(path: str) -> str:
    """Text of a file of the system; empty where there is none."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return ""


def _allowed_cpus() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _model_name(cpuinfo: str) -> str:
    named = re.search(r"^model name\s*: *(.+)$", cpuinfo, flags=re.MULTILINE)
    found = named[1] if named else platform.processor() or platform.machine()
    return " ".join(found.split())[:80] or "an unnamed processor"


def _cores(cpuinfo: str, allowed: frozenset[int]) -> tuple[int, int]:
    """Sockets and physical cores that may be used; a core with two hardware threads is one."""
    found = set()
    for block in cpuinfo.split("\n\n"):
        fields = dict(re.findall(r"^([^:\t]+?)\s*: *(.*)$", block, flags=re.MULTILINE))
        if fields.get("processor", "").isdigit() and int(fields["processor"]) in allowed:
            number = fields["processor"]
            found.add((fields.get("physical id", "0"), fields.get("core id", number)))
    cores = len(found) or len(allowed)
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and all(part.isdigit() for part in quota) and int(quota[1]) > 0:
        cores = max(1, min(cores, round(int(quota[0]) / int(quota[1]))))
    sockets = len({socket for socket, _ in found}) or 1
    return (sockets if cores % sockets == 0 else 1), cores


def _memory(meminfo: str) -> tuple[int, int]:
    """All memory and what is free of it, within the limits of this process [byte]."""
    found = {key: 1024 * int(value) for key, value in re.findall(r"^(\w+): +(\d+) kB$", meminfo, flags=re.MULTILINE)}
    total = found.get("MemTotal", _MEMORY)
    free = found.get("MemAvailable", total // 2)
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        total = min(total, int(limit))
        free = min(free, max(0, int(limit) - int(used)))
    return total, free


def _last_cache(allowed: frozenset[int]) -> int:
    """All of the last caches of the processors that may be used; a cache that several share counts once [byte]."""
    sizes: dict[str, int] = {}
    for cpu in allowed:
        levels = {}
        for index in range(8):
            folder = f"/sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            size = re.fullmatch(r"(\d+)([KM])", _read(f"{folder}/size").strip())
            level = _read(f"{folder}/level").strip()
            if size and level.isdigit():
                shared = _read(f"{folder}/shared_cpu_list").strip() or str(cpu)
                levels[int(level)] = (shared, int(size[1]) * {"K": 2**10, "M": 2**20}[size[2]])
        if levels:
            shared, size_bytes = levels[max(levels)]
            sizes[shared] = size_bytes
    return sum(sizes.values()) or _LAST_CACHE


def _blas() -> str:
    """Name, version and kernels of the library that multiplies NumPy's matrices."""
    from threadpoolctl import threadpool_info

    for library in threadpool_info():
        if library.get("user_api") == "blas":
            words = (library.get("internal_api"), library.get("version"), library.get("architecture"))
            return " ".join(str(word) for word in words if word)
    return ""
