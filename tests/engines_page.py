"""The generated parts of docs/engines.md: numbers of the bundled profiles with their sources, and shares of bandwidth.

``python tests/engines_page.py`` writes them anew into the page.
"""

from pathlib import Path

from perfmodel.hardware import EngineSpec, System, list_specs, load_spec, load_system
from perfmodel.kernels import point as place
from perfmodel.point import hardware_point

PAGE = Path(__file__).resolve().parent.parent / "docs" / "engines.md"
#: Stored bits of a weight in the comparison of bandwidths: four, and a scale of 16 bits for 32 weights.
BITS = 4.5
GPUS = ("gb10", "rtx-3090", "rtx-4090", "rtx-5090")
#: Keys of a profile by the table that they are in.
TABLES = {
    "gpu": (
        "memory_efficiency", "expert_efficiency", "memory_n_half_kb", "compute_efficiency", "launch", "kernel_us",
        "attention_kernels", "recurrent_kernels", "expert_kernels", "dense_kernels", "step_kernels", "step_us",
        "sequence_us",
    ),
    "rest": (
        "experts", "expert_tile_tokens", "batched_from_tokens", "batched_layer_us", "all_reduce_us",
        "peer_all_reduce_us", "copies", "pageable_gb_per_s", "copy_overhead_us", "round_trip_us", "overlap",
        "cpu_efficiency", "cpu_units", "cpu_compute_efficiency", "prefill_experts", "prefill_cpu_below_tokens",
        "micro_batch_tokens",
    ),
}  # fmt: skip


def profiles() -> dict[str, EngineSpec]:
    """The bundled profiles by name."""
    found = (load_spec(entry.name) for entry in list_specs() if entry.kind == "engine")
    return {spec.name: spec for spec in found if isinstance(spec, EngineSpec)}


def numbers(keys: tuple[str, ...]) -> str:
    """A row for each profile, or for several with the same values, and a column for each key."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, spec in profiles().items():
        values = (getattr(spec, key) for key in keys)
        cells = tuple("-" if value is None else value if isinstance(value, str) else f"{value:g}" for value in values)
        rows.setdefault(cells, []).append(f"`{name}`")
    header = ["profile", *(f"`{key}`" for key in keys)]
    return _table(header, [[", ".join(names), *cells] for cells, names in rows.items()])


def sources() -> str:
    """Where every number comes from: a row for each source and the profiles that it holds for, with its keys."""
    holds: dict[tuple[str, str, str], list[str]] = {}
    for name, spec in profiles().items():
        for key in spec.numeric_keys():
            origin = spec.source_of(key)
            holds.setdefault((origin.source, origin.citation, key), []).append(name)
    rows: dict[tuple[str, str, str], list[str]] = {}
    order = [key for keys in TABLES.values() for key in keys]
    for (kind, citation, key), names in sorted(holds.items(), key=lambda one: order.index(one[0][2])):
        rows.setdefault((kind, citation, ", ".join(names)), []).append(f"`{key}`")
    return _table(
        ["keys", "source", "where from", "profiles"],
        [[", ".join(keys), kind, citation, names] for (kind, citation, names), keys in rows.items()],
    )


def on(gpu: str, engine: str = "llama-cpp-cuda") -> System:
    """A machine with this GPU under an engine."""
    spec = load_spec(gpu)
    return load_system("rtx4090-pcie4-cpu").model_copy(update={"gpu": spec}).with_engine(engine)


def expert_share(system: System) -> float:
    """Share of the bandwidth that the expert kernels of a layer reach at batch 1 [1].

    Eight experts of 2048 x 768, so that K is 2048 (gate, up) and 768 (down), with the layer's fixed times.
    """
    point = hardware_point(system)
    moved = 3 * 8 * 2048 * 768 * BITS / 8
    fixed = 3 * point[place.MATRIX_FIXED] + point[place.EXPERTS_FIXED]
    return float(moved / system.gpu.memory_bandwidth_bytes_per_s / (moved / point[place.EXPERT_BANDWIDTH] + fixed))


def dense_share(system: System, rows: int, cols: int) -> float:
    """The same of one dense matrix, with the fixed time of its kernel [1]."""
    point, engine = hardware_point(system), system.engine
    assert engine is not None
    moved = rows * cols * BITS / 8
    time = (moved + point[place.GPU_N_HALF]) / point[place.GPU_BANDWIDTH] + engine.kernel_s
    return float(moved / system.gpu.memory_bandwidth_bytes_per_s / time)


def shares() -> str:
    """Shares of the memory bandwidth at batch 1 by GPU, under `llama-cpp-cuda`."""
    rows = []
    for gpu in GPUS:
        system = on(gpu)
        values = (expert_share(system), *(dense_share(system, 5120, cols) for cols in (5120, 25600)))
        rows.append([f"`{gpu}`", *(f"{100 * value:.0f} %" for value in values)])
    return _table(["GPU", "experts of a layer, K = 768 and 2048", "dense 5120 x 5120", "dense 5120 x 25600"], rows)


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parts() -> dict[str, str]:
    """Every generated part by its name."""
    return {**{name: numbers(keys) for name, keys in TABLES.items()}, "sources": sources(), "shares": shares()}


def written(page: str) -> str:
    """The page with its generated parts anew."""
    for name, text in parts().items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        head, found, rest = page.partition(begin)
        assert found, name
        _, found, tail = rest.partition(end)
        assert found, name
        page = f"{head}{begin}{text}\n{end}{tail}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
