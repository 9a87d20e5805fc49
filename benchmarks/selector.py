"""The bit-width selector: targets, other ways to the same answer, and growth, in one run on one core.

``python benchmarks/selector.py [--json] [--plot FILE]``

Tables are random: losses fall with bits, and experts differ. Every time is that of the fastest of several passes,
because machines are shared; ratios carry over from one machine to another, times do not. The exit code is 1 where a
target is missed.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable
from functools import partial
from operator import add
from pathlib import Path
from typing import Any

import numba
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run import fastest
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from perfmodel import placement
from perfmodel.bitwidth import assigned_loss, bitwidth_front, optimal_bitwidths, select_bitwidths
from perfmodel.errors import PerfModelError
from perfmodel.plots.formats import check_suffix
from perfmodel.routing import statistics

MEAN_BITS = 2.5
Cuts = Callable[[list[float], list[float], list[float], int], tuple[int, int]]
#: Mixtral-8x22B: layers, experts, and how many of them stay near memory.
LAYERS, EXPERTS, COLD = 56, 8, 6
SEQUENCES = 1000
COMPARED = (8, 64, 256)
GROWTH = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
#: What the project promises.
TARGETS = {
    "one sequence, 56 layers x 6 experts [us]": 20.0,
    "one sequence, 56 layers x 8 experts [us]": 20.0,
    "1,000 sequences x 56 layers x 8 experts [ms]": 20.0,
    "importance, placement and selection of 1,000 sequences [ms]": 60.0,
    "61 layers x 256 experts [ms]": 5.0,
}
#: Least ratio of a layer of a batch to each other way, and the largest power of experts that its time may grow with.
LEAST_RATIOS = {"python": 50.0, "highs": 1000.0}
LARGEST_EXPONENT = 2.1


def tables(*shape: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Importance and losses of random experts; a bit makes losses 1.5 to 6 times smaller."""
    rng = np.random.default_rng(seed)
    losses = rng.exponential(size=(*shape, 1)) / np.cumprod(rng.uniform(1.5, 6.0, (*shape, 4)), axis=-1)
    return rng.random(shape), losses


def repeated_s(call: Callable[[], Any], times: int) -> float:
    """Time of one of many calls in a row [s]."""

    def many() -> None:
        for _ in range(times):
            call()

    return fastest(many) / times


# --- other ways to the same answer ---


def cuts_by_loop(gain4: list[float], gain3: list[float], gain2: list[float], increments: int) -> tuple[int, int]:
    """The best split with two loops."""
    num = len(gain4) - 1
    best, first, second = float("-inf"), 0, 0
    for a in range(max(0, increments - 2 * num), increments // 3 + 1):
        left, fourth = increments - a, gain4[a]
        for b in range(max(a, left - num), left // 2 + 1):
            total = gain3[b] + gain2[left - b] + fourth
            if total > best:
                best, first, second = total, a, b
    return first, second


def cuts_by_slices(gain4: list[float], gain3: list[float], gain2: list[float], increments: int) -> tuple[int, int]:
    """The best split with built-ins over slices in place of the inner loop; faster from some experts on."""
    num = len(gain4) - 1
    gain2 = gain2[::-1]  # c falls where b rises
    best, first = float("-inf"), 0
    for a in range(max(0, increments - 2 * num), increments // 3 + 1):
        left = increments - a
        low, end, shift = max(a, left - num), left // 2 + 1, num - left
        total = max(map(add, gain3[low:end], gain2[low + shift : end + shift])) + gain4[a]
        if total > best:
            best, first = total, a
    left = increments - first
    low, end, shift = max(first, left - num), left // 2 + 1, num - left
    totals = list(map(add, gain3[low:end], gain2[low + shift : end + shift]))
    return first, low + totals.index(max(totals))


def python_search(importance: list[float], losses: list[list[float]], increments: int, cuts: Cuts) -> list[int]:
    """The same search of one layer in plain Python: sort, prefix sums, O(1) a split."""
    num = len(importance)
    order = sorted(range(num), key=importance.__getitem__, reverse=True)
    fourth = third = second = 0.0
    gain4, gain3, gain2 = [0.0], [0.0], [0.0]
    for e in order:
        loss1, loss2, loss3, loss4 = losses[e]
        fourth += loss3 - loss4
        third += loss2 - loss3
        second += loss1 - loss2
        gain4.append(fourth)
        gain3.append(third)
        gain2.append(second)
    a, b = cuts(gain4, gain3, gain2, increments)
    bits = [1] * num
    for cut in (a, b, increments - a - b):
        for e in order[:cut]:
            bits[e] += 1
    return bits


def by_highs(losses: np.ndarray, increments: int) -> np.ndarray:
    """Bits of one layer by mixed-integer programming: the optimum in any order."""
    count = losses.size
    one_each = csr_array((np.ones(count), np.arange(count), np.arange(0, count + 1, 4)))
    spent = np.tile(np.arange(4.0), (1, len(losses)))
    solved = milp(
        losses.ravel(),
        integrality=np.ones(count),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(spent, increments, increments)],
        options={"mip_rel_gap": 0.0},
    )
    return np.argmax(solved.x.reshape(-1, 4), axis=1) + 1


# --- what is measured ---


def measured_targets() -> dict[str, float]:
    """Every target in its own unit."""
    cold_rank, cold_losses = tables(LAYERS, COLD)
    rank, losses = tables(LAYERS, EXPERTS)
    ranks = tables(SEQUENCES, LAYERS, EXPERTS)[0]
    wide_rank, wide_losses = tables(61, 256)
    rng = np.random.default_rng(1)
    counts = rng.poisson(16, ranks.shape)
    weight_sums = counts * rng.uniform(0.3, 0.7, counts.shape)

    def together() -> np.ndarray:
        importance = placement.importance_of(counts, weight_sums)
        order = statistics.ranked_experts(importance)
        hot = np.zeros(order.shape, np.bool_)
        np.put_along_axis(hot, order[..., :-COLD], True, axis=-1)
        cold = order[..., -COLD:]
        rank_of_cold = np.take_along_axis(importance, cold, axis=-1)
        return select_bitwidths(rank_of_cold, losses[np.arange(LAYERS)[:, None], cold], MEAN_BITS)

    found = (
        1e6 * repeated_s(lambda: select_bitwidths(cold_rank, cold_losses, MEAN_BITS), 200),
        1e6 * repeated_s(lambda: select_bitwidths(rank, losses, MEAN_BITS), 200),
        1e3 * fastest(lambda: select_bitwidths(ranks, losses, MEAN_BITS)),
        1e3 * fastest(together),
        1e3 * fastest(lambda: select_bitwidths(wide_rank, wide_losses, MEAN_BITS)),
    )
    return dict(zip(TARGETS, found, strict=True))


def layer_s(num_experts: int) -> float:
    """Time per layer of a batch of sequences that share the losses of 61 layers [s]."""
    sequences = max(1, 2**16 // num_experts**2)
    _, losses = tables(61, num_experts)
    importance = np.random.default_rng(2).random((sequences, 61, num_experts))
    return fastest(lambda: select_bitwidths(importance, losses, MEAN_BITS), 30) / (sequences * 61)


def compared(num_experts: int) -> dict[str, float]:
    """One layer by all ways."""
    importance, losses = tables(num_experts)
    increments = int(num_experts * (MEAN_BITS - 1))
    bits, best = select_bitwidths(importance, losses, MEAN_BITS), optimal_bitwidths(losses, MEAN_BITS)
    rows, both = (importance.tolist(), losses.tolist(), increments), (cuts_by_loop, cuts_by_slices)
    assert all(bits.tolist() == python_search(*rows, cuts) for cuts in both)
    exact = by_highs(losses, increments)
    many = np.repeat(losses[None], max(8, 4096 // num_experts), axis=0)
    passes = 3 if num_experts > 100 else 7
    batch = 1e6 * layer_s(num_experts)
    call = 1e6 * repeated_s(lambda: select_bitwidths(importance, losses, MEAN_BITS), 200)
    others = {
        "python": 1e6
        * min(repeated_s(partial(python_search, *rows, cuts), max(1, 800 // num_experts)) for cuts in both),
        "highs": 1e6 * fastest(lambda: by_highs(losses, increments), passes),
    }
    return {
        "experts": num_experts,
        "per_layer_of_a_batch_us": batch,
        "single_layer_call_us": call,
        **{f"{name}_us": time for name, time in others.items()},
        **{f"{name}_to_batch": time / batch for name, time in others.items()},
        **{f"{name}_to_call": time / call for name, time in others.items()},
        "optimum_us": 1e6 * fastest(lambda: optimal_bitwidths(many, MEAN_BITS)) / len(many),
        "prefix_loss": float(assigned_loss(losses, bits)),
        "optimum_loss": float(assigned_loss(losses, best)),
        "highs_loss": float(assigned_loss(losses, exact)),
    }


def measured_model() -> dict[str, float]:
    """One budget for a model of 61 layers x 256 experts [s]."""
    importance, losses = tables(61, 256)
    return {
        "prefix_s": fastest(lambda: select_bitwidths(importance, losses, MEAN_BITS, scope="model"), 2),
        "optimum_s": fastest(lambda: optimal_bitwidths(losses, MEAN_BITS, scope="model"), 2),
        "front_of_all_budgets_s": fastest(lambda: bitwidth_front(losses, scope="model"), 2),
    }


def measure() -> dict[str, Any]:
    """Everything this script prints."""
    times = [layer_s(num) for num in GROWTH]
    exponent, offset = np.polyfit(np.log(GROWTH), np.log(times), 1)
    wide = GROWTH.index(64)
    steepest = np.polyfit(np.log(GROWTH[wide:]), np.log(times[wide:]), 1)[0]
    return {
        "targets": {name: {"found": found, "target": TARGETS[name]} for name, found in measured_targets().items()},
        "compared": [compared(num) for num in COMPARED],
        "growth": {
            "experts": list(GROWTH),
            "layer_us": [1e6 * t for t in times],
            "exponent": float(exponent),
            "exponent_from_64_experts": float(steepest),
            "fitted_us": [float(1e6 * np.exp(offset) * num**exponent) for num in GROWTH],
        },
        "model": measured_model(),
        "thresholds": {
            **{f"{name}_to_batch_at_least": least for name, least in LEAST_RATIOS.items()},
            "exponent_at_most": LARGEST_EXPONENT,
        },
        "mean_bits": MEAN_BITS,
        "versions": {"python": platform.python_version(), "numba": numba.__version__, "numpy": np.__version__},
    }


def missed_targets(found: dict[str, Any]) -> list[str]:
    """Names of all targets that are missed."""
    missed = [name for name, row in found["targets"].items() if row["found"] > row["target"]]
    for row in found["compared"]:
        missed += [
            f"{name} over a layer of a batch, {row['experts']} experts"
            for name, least in LEAST_RATIOS.items()
            if row[f"{name}_to_batch"] < least
        ]
    growth = found["growth"]
    if max(growth["exponent"], growth["exponent_from_64_experts"]) > LARGEST_EXPONENT:
        missed.append("growth with experts")
    return missed


# --- what is shown ---


def report(found: dict[str, Any]) -> str:
    """Tables for people."""
    lines = ["target                                                          found    target"]
    for name, row in found["targets"].items():
        verdict = "" if row["found"] <= row["target"] else "   MISSED"
        lines.append(f"{name:60s} {row['found']:8.2f} {row['target']:9.0f}{verdict}")
    least = ", ".join(f"{name} at least {ratio:.0f}" for name, ratio in LEAST_RATIOS.items())
    lines += ["", "one layer, other ways    plain Python [us]    HiGHS [us]   optimum in a batch [us]"]
    lines += [
        f"{row['experts']:3.0f} experts {row['python_us']:29.1f} {row['highs_us']:13.0f} {row['optimum_us']:25.2f}"
        for row in found["compared"]
    ]
    for key, of, note in (
        ("per_layer_of_a_batch_us", "batch", f"per layer of a batch [us]; {least}"),
        ("single_layer_call_us", "call", "single-layer call from Python, with its checks [us]"),
    ):
        lines += ["", note, "                      time   plain Python / it   HiGHS / it"]
        for row in found["compared"]:
            ratios = {name: row[f"{name}_to_{of}"] for name in LEAST_RATIOS}
            short = of == "batch" and any(ratios[name] < LEAST_RATIOS[name] for name in ratios)
            lines.append(
                f"{row['experts']:3.0f} experts {row[key]:14.3f} {ratios['python']:19.0f} {ratios['highs']:12.0f}"
                f"{'   MISSED' if short else ''}"
            )
    lines += ["", "summed loss        prefix rule         optimum           HiGHS    prefix / optimum"]
    lines += [
        f"{row['experts']:3.0f} experts {row['prefix_loss']:18.9f} {row['optimum_loss']:15.9f} "
        f"{row['highs_loss']:15.9f} "
        f"{row['prefix_loss'] / row['optimum_loss']:19.4f}"
        for row in found["compared"]
    ]
    growth = found["growth"]
    exponents = growth["exponent"], growth["exponent_from_64_experts"]
    missed = "" if max(exponents) <= LARGEST_EXPONENT else "   MISSED"
    every, wide = (f"E^{exponent:.2f}" for exponent in exponents)
    lines += [
        "",
        f"growth with experts: time ~ {every}, from 64 experts on {wide} (at most {LARGEST_EXPONENT}){missed}",
    ]
    pairs = zip(growth["experts"], growth["layer_us"], strict=True)
    lines.append("  ".join(f"{num}: {us:.3g} us" for num, us in pairs))
    lines += ["", "one budget for 61 layers x 256 experts: " + ", ".join(
        f"{name.removesuffix('_s').replace('_', ' ')} {seconds:.2f} s" for name, seconds in found["model"].items()
    )]  # fmt: skip
    return "\n".join(lines)


def draw(growth: dict[str, Any], path: str) -> None:
    """Time of a layer against its experts, and the fitted power."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    from perfmodel.plots.canvas import canvas, save
    from perfmodel.plots.style import COLUMN, GREY, LINES

    with canvas(1, 1, (COLUMN, 2.6)) as (figure, panels):
        panel = panels[0, 0]
        panel.plot(growth["experts"], growth["layer_us"], label="measured", **LINES[0].options())
        label = f"fitted: power {growth['exponent']:.2f} of experts"
        panel.plot(growth["experts"], growth["fitted_us"], color=GREY, linewidth=0.8, label=label)
        panel.set(xscale="log", yscale="log", xlabel="experts of a layer", ylabel="prefix search of a layer [µs]")
        panel.xaxis.set_major_locator(FixedLocator(growth["experts"][::2]))
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0,)))
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.legend()
    save(figure, path)


def _check_target(parser: argparse.ArgumentParser, path: Path) -> None:
    """Refuse a figure that could not be written before anything is measured."""
    try:
        check_suffix(path)
    except PerfModelError as error:
        parser.error(str(error))
    if not path.parent.is_dir():
        parser.error(f"--plot: no folder {path.parent}")


def main() -> None:
    """Print tables, or one JSON document; exit with 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--plot", metavar="FILE", help="draw the growth with experts to .png, .svg or .pdf")
    options = parser.parse_args()
    if options.plot:
        _check_target(parser, Path(options.plot))
    found = measure()
    found["missed"] = missed_targets(found)
    print(json.dumps(found, indent=2) if options.json else report(found))
    if options.plot:
        draw(found["growth"], options.plot)
    sys.exit(1 if found["missed"] else 0)


if __name__ == "__main__":
    main()
