"""How far the reproduction depends on what was chosen: readings, traces, the baselines' own best, precision."""

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from perfmodel import placement
from perfmodel.errors import PlacementError, PolicyError
from perfmodel.evidence.bench import MODELS, Bench, Case, policy_text, predictor
from perfmodel.evidence.calibrate import calibrate
from perfmodel.evidence.figures import OUTPUT, PROMPT, Figure, geometric_mean_error
from perfmodel.hardware import LinkSpec, NdpSpec, System, load_spec
from perfmodel.point import dram_efficiency, hardware_point
from perfmodel.policies import ABLATIONS
from perfmodel.routing import RoutingTrace
from perfmodel.routing.synthetic import MIXTRAL_SKEW, generate

#: The constants that are fitted, and nothing else.
FITTED_KEYS = ("gpu.memory_efficiency", "ndp.dram_efficiency", "link.bandwidth_gb_per_s")
#: Readings of the systems whose effect on the error is reported: what stands in for each system's default.
READINGS: dict[str, dict[str, str]] = {
    "as reported": {},
    "GPU and NDP in turn (overlap=sum)": {"context-aware": "context-aware:overlap=sum"},
    "importance from counts alone (alpha=1)": {"context-aware": "context-aware:alpha=1"},
    "importance from weights alone (alpha=0)": {"context-aware": "context-aware:alpha=0"},
    "importance by min-max": {"context-aware": "context-aware:norm=min-max"},
    "uniform bits": {"context-aware": "context-aware:selector=uniform"},
    "placed by the other sequences (static)": {"context-aware": "static"},
    "MoNDE keeps the last copied expert": {"monde": "monde:resident=1"},
    "MoNDE by its balance rule": {"monde": "monde:reading=balance"},
    "HOBBIT by its thresholds (split=gates)": {"hobbit": "hobbit:split=gates"},
    "HOBBIT caches one expert a layer": {"hobbit": "hobbit:cache_high=1"},
}
#: Where the measured efficiency of whole decode steps lies on other GPUs, lowest and highest.
MEASURED_GPU_EFFICIENCY = (0.27, 0.41)
#: Other links, by the name of their spec.
OTHER_LINKS = {"PCIe 5 x16": "pcie-5.0-x16", "PCIe 4 x16": "pcie-4.0-x16"}
#: Scales of quantised weights in the what-if beside the near-data rows: FP16, one for 64 weights [bit a weight].
GROUP_SCALE_BITS = 0.25
#: Generated traces beside the recording, from no variation between sequences to much: the hit rate rises with it.
CONCENTRATIONS = {"sequences alike": math.inf, "Mixtral's skew": None, "sequences very different": 10.0}
#: Readings of each baseline that its own authors could have chosen on this machine, with K experts a layer on the GPU.
OWN_READINGS: dict[str, tuple[str, ...]] = {
    "monde": ("monde", "monde:reading=balance", "monde:resident={K}"),
    "hobbit": ("hobbit", "hobbit:split=gates", "hobbit:cache_high={K},prefetch_accuracy=0.96"),
}


class Outcome(NamedTuple):
    """Errors of one reading or trace: with the evidence alone, and with the constants fitted anew."""

    name: str
    evidence_geomean_error: float
    geomean_error: float
    hit_rate: dict[str, float]
    values: dict[str, float]


class OwnBest(NamedTuple):
    """A baseline at its own fastest reading, and the speed-up that is left over it.

    gpu_experts : experts a layer that both sides may keep on the GPU: the published count, or the most that fit.
    gains : speed-up of the context-aware system, with as many experts on the GPU, by mean bits.
    """

    model: str
    baseline: str
    gpu_experts: int
    reading: str
    tok_per_s: float
    default_tok_per_s: float
    gains: dict[str, float]


def outcome(
    name: str,
    bench: Bench,
    figures: tuple[Figure, ...],
    evidence: System,
    readings: Mapping[str, str],
    near: tuple[float, ...],
) -> Outcome:
    """Errors of one reading, trace or machine: as it is, and with the constants fitted anew from ``near``."""
    predict = predictor(bench, figures, readings)
    published = [figure.value[0] for figure in figures]
    plain = predict(hardware_point(evidence)[None, :])[0] - np.log(published)
    fit = calibrate(evidence, FITTED_KEYS, predict, published, leave_one_out=False, start=near)
    rates = {}
    for model in MODELS:
        case = Case(model, policy_text(readings.get("context-aware", "context-aware"), 3), OUTPUT)
        rates[model] = bench.run(case).hit_rates.own
    return Outcome(
        name, geometric_mean_error([abs(float(r)) for r in plain]), fit.geomean_error, rates, fit.overrides()
    )


def tried_readings(
    bench: Bench, figures: tuple[Figure, ...], evidence: System, near: tuple[float, ...]
) -> tuple[tuple[Outcome, ...], list[str]]:
    """The outcome of every reading, and why some were left out."""

    tried, left_out = [], []
    for name, readings in READINGS.items():
        try:
            tried.append(outcome(name, bench.branch(), figures, evidence, readings, near))
        except PolicyError as error:  # the trace lacks what this reading needs, such as routing weights
            left_out.append(f"reading left out, {name}: {error}")
    return tuple(tried), left_out


def tried_traces(figures: tuple[Figure, ...], evidence: System, near: tuple[float, ...]) -> Iterator[Outcome]:
    """The outcome of every generated trace."""
    for name, concentration in CONCENTRATIONS.items():
        bench = Bench(synthetic_trace(concentration), evidence)
        yield outcome(f"generated, {name} (synthetic)", bench, figures, evidence, {}, near)


def other_machines(evidence: System) -> dict[str, System]:
    """The evidence with one piece of it exchanged for another that could be argued as well."""
    lowest, highest = MEASURED_GPU_EFFICIENCY
    interleaved = load_spec("monde-ndp-interleaved")
    assert isinstance(interleaved, NdpSpec)
    changes: dict[str, dict[str, float]] = {
        f"GPU reads at {lowest:g} of peak, the lowest measured": {"gpu.memory_efficiency": lowest},
        f"GPU reads at {highest:g} of peak, the highest measured": {"gpu.memory_efficiency": highest},
        "DRAM interleaved over bank groups": {"ndp.dram_efficiency": dram_efficiency(interleaved)},
    }
    for label, name in OTHER_LINKS.items():
        link = load_spec(name)
        assert isinstance(link, LinkSpec)
        values = {key: float(getattr(link, key)) for key in ("bandwidth_gb_per_s", "efficiency", "latency_us")}
        rate = link.effective_bandwidth_bytes_per_s / 1e9
        changes[f"link {label} at {rate:.1f} GB/s"] = {f"link.{key}": value for key, value in values.items()}
    return {label: evidence.with_values(values) for label, values in changes.items()}


def tried_machines(
    bench: Bench, figures: tuple[Figure, ...], evidence: System, near: tuple[float, ...]
) -> Iterator[Outcome]:
    """The outcome of every other machine. Refitted, they meet again: the fit moves just these constants."""
    for name, system in other_machines(evidence).items():
        yield outcome(name, bench, figures, system, {}, near)


def own_best(bench: Bench, system: System) -> tuple[OwnBest, ...]:
    """Every baseline at its fastest reading, with the published count of GPU experts and with the most that fit."""
    found = []
    point = hardware_point(system)[None, :]

    @functools.cache
    def rate(model: str, policy: str) -> float:
        # A branch each, so that no plan outlives its price.
        return float(1.0 / bench.branch().run(Case(model, policy, OUTPUT)).mean_token_s(point)[0])

    for model in MODELS:
        published = int(bench.run(Case(model, policy_text("context-aware", 3), OUTPUT)).plan.gpu_experts)
        capacity = system.gpu.memory_capacity_bytes
        most = placement.largest_gpu_experts(bench.models[model], capacity, PROMPT + OUTPUT)
        for count in sorted({published, most}):
            option = "" if count == published else f"gpu_experts={count}"
            ours = {f"{bits:g}-bit": rate(model, policy_text("context-aware", bits, option)) for bits in (3.0, 2.0)}
            for baseline, readings in OWN_READINGS.items():
                rates: dict[str, float] = {}
                for policy in (text.format(K=count) for text in readings):
                    with contextlib.suppress(PlacementError, PolicyError):  # no room, or the trace lacks something
                        rates[policy] = rate(model, policy)
                best = max(rates, key=rates.__getitem__)
                gains = {name: one / rates[best] for name, one in ours.items()}
                found.append(OwnBest(model, baseline, count, best, rates[best], rates[baseline], gains))
    return tuple(found)


def ndp_reduction(bench: Bench, system: System) -> dict[str, dict[str, float]]:
    """How much less time the near-data device works than at full precision, by mean bits.

    With uniform bits it is 16 / bits exactly; beside it what the selector's uneven bits make of it, and group scales.
    """
    scaled = system.with_values(
        {"ndp.scale_bits_per_weight": GROUP_SCALE_BITS}, citation="one FP16 scale for 64 weights"
    )
    result: dict[str, dict[str, float]] = {}
    for model in MODELS:
        full = bench.run(Case(model, policy_text("context-aware", None, ABLATIONS["placement only"]), OUTPUT))
        whole = full.price(system).ndp_side_s
        result[model] = {}
        for bits in (3.0, 2.0):
            uniform = bench.run(Case(model, policy_text("context-aware", bits, ABLATIONS["uniform bits"]), OUTPUT))
            selected = bench.run(Case(model, policy_text("context-aware", bits), OUTPUT))
            result[model] |= {
                f"{bits:g}-bit uniform": whole / uniform.price(system).ndp_side_s,
                f"{bits:g}-bit selected": whole / selected.price(system).ndp_side_s,
                f"{bits:g}-bit selected with group scales": whole / selected.price(scaled).ndp_side_s,
            }
    return result


def synthetic_trace(concentration: float | None = None) -> RoutingTrace:
    """A generated trace with Mixtral's published skew between experts (marked synthetic).

    concentration : how alike the sequences are; by default what goes with the published skew.
    """
    skew = MIXTRAL_SKEW if concentration is None else MIXTRAL_SKEW._replace(sequence_concentration=concentration)
    return generate(3, PROMPT, 128, 32, 8, 2, seed=0, **skew._asdict())
