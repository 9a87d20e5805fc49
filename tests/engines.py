"""Random inference engines within physical bounds."""

from typing import Any

from hypothesis import strategies as st
from strategies import spread_floats, zero_or

from perfmodel.hardware import EngineSpec, Source

#: Words of an engine that has no cost of its own.
PLAIN: dict[str, Any] = {
    "name": "toy",
    "description": "an engine of round numbers",
    "memory_efficiency": 1.0,
    "compute_efficiency": 1.0,
    "launch": "graph",
    "kernel_us": 0.0,
    "attention_kernels": 0,
    "recurrent_kernels": 0,
    "expert_kernels": 0,
    "dense_kernels": 0,
    "step_kernels": 0,
    "experts": "grouped",
    "copies": "pinned",
    "overlap": "max",
    "prefill_experts": "stream",
}


def engine(**changes: Any) -> EngineSpec:
    """An engine without any cost, with some values changed; all of them assumed."""
    values = {**PLAIN, **changes}
    numbers = {key for key, value in values.items() if isinstance(value, int | float)}
    source = Source(source="assumed", citation="a test")
    return EngineSpec(**values, sources=dict.fromkeys(numbers, source))


@st.composite
def engines(draw: st.DrawFn) -> EngineSpec:
    """Engines of every sort: grouped or single experts, a switch of kernels, tiles, copies, units of the CPU."""
    share, count = st.floats(0.2, 1.0), zero_or(st.integers(1, 30))
    fixed = zero_or(spread_floats(0.01, 50.0))
    values: dict[str, Any] = {
        "memory_efficiency": draw(share),
        "compute_efficiency": draw(share),
        "memory_n_half_kb": draw(zero_or(spread_floats(0.1, 5000.0))),
        "launch": draw(st.sampled_from(["graph", "stream"])),
        "kernel_us": draw(fixed),
        "step_us": draw(fixed),
        "sequence_us": draw(fixed),
        "all_reduce_us": draw(fixed),
        "peer_all_reduce_us": draw(fixed),
        "experts": draw(st.sampled_from(["grouped", "single"])),
        "copies": draw(st.sampled_from(["pinned", "pageable"])),
        "pageable_gb_per_s": draw(spread_floats(0.5, 50.0)),
        "cpu_units": draw(st.sampled_from(["matrix", "vector"])),
        "overlap": draw(st.sampled_from(["max", "sum"])),
        "prefill_experts": draw(st.sampled_from(["stream", "cpu"])),
    }
    values |= {f"{kind}_kernels": draw(count) for kind in ("attention", "recurrent", "expert", "dense", "step")}
    optional = {
        "expert_efficiency": share,
        "expert_tile_tokens": st.sampled_from([1, 4, 16, 128]),
        "copy_overhead_us": fixed,
        "round_trip_us": fixed,
        "cpu_efficiency": share,
        "cpu_compute_efficiency": share,
    }
    values |= {key: draw(one) for key, one in optional.items() if draw(st.booleans())}
    if draw(st.booleans()):
        values |= {"batched_from_tokens": draw(st.sampled_from([1, 2, 5])), "batched_layer_us": draw(fixed)}
    return engine(**values)
