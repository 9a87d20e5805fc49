"""Reads files in a process of its own and tells for each what came of it, the time and memory it took, and whether
anything heavy was imported. Standard input: a list of [reader, path, options]; standard output: a list of answers."""

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEAVY = ("numba", "torch", "scipy", "pandas", "xarray", "transformers", "matplotlib")


def memory(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since the last reset."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(field))
    return int(line.split()[1]) * 1024


def readers() -> dict[str, Callable[[Path, dict[str, Any]], Any]]:
    """Everything that reads a file, by name: the formats and ``auto``, and other readers of ``.npz`` files."""
    from perfmodel.routing import RoutingTrace
    from perfmodel.routing.blocks import open_trace
    from perfmodel.routing.importers import formats, import_files
    from perfmodel.routing.importers.base import ImportOptions
    from perfmodel.routing.profile import FrequencyProfile

    def imports(name: str) -> Callable[[Path, dict[str, Any]], Any]:
        def read(path: Path, options: dict[str, Any]) -> Any:
            said = {key: tuple(one) if isinstance(one, list) else one for key, one in options.items()}
            return import_files(name, [path], ImportOptions(**said))

        return read

    found: dict[str, Callable[[Path, dict[str, Any]], Any]] = {name: imports(name) for name in (*formats(), "auto")}
    found["RoutingTrace.load"] = lambda path, _: RoutingTrace.load(path)
    found["FrequencyProfile.load"] = lambda path, _: FrequencyProfile.load(path)
    found["open_trace"] = lambda path, _: [len(block.ids) for block in open_trace(path).blocks(weights=True)]
    return found


def losses() -> dict[str, Callable[[Path, dict[str, Any]], Any]]:
    """Readers of files beside traces; their packages hold kernels."""
    from perfmodel.bitwidth import LossTable
    from perfmodel.losses.calibration import Calibration

    return {
        "LossTable.load": lambda path, _: LossTable.load(path),
        "Calibration.load": lambda path, _: Calibration.load(path),
    }


def main() -> None:
    jobs = json.load(sys.stdin)
    found = readers()
    if not found.keys() >= {reader for reader, _, _ in jobs}:
        found = losses()
    answers = []
    gc.freeze()  # what is there now need not be looked through before every file
    for reader, path, options in jobs:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        known, before, start = set(sys.modules), memory("VmRSS"), time.process_time()
        try:
            result = found[reader](Path(path), options)
            outcome, message = "read", type(result).__name__
        except BaseException as error:
            outcome, message = type(error).__name__, str(error)
        answers.append(
            {
                "reader": reader,
                "path": path,
                "outcome": outcome,
                "message": message,
                "seconds": time.process_time() - start,
                "bytes": memory("VmHWM") - before,
                "heavy": [name for name in HEAVY if name in sys.modules and name not in known],
            }
        )
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
