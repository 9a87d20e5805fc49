"""Rates of a CPU that experts reached when they were measured: no engine takes its share of them again."""

import numpy as np
import pytest
from strategies import mixtral, recording

from perfmodel import oracle
from perfmodel.errors import SpecError
from perfmodel.hardware import System, load_system
from perfmodel.hardware.engine import REPLACED
from perfmodel.run import plan_run

MACHINE = load_system("h100-pcie5-cpu")
OF_CPU = [key for key in REPLACED if key.startswith("cpu.")]


def machine(rates: str, engine: str | None = None) -> System:
    """The machine with a CPU whose rates are peaks, or were reached by experts."""
    assert MACHINE.cpu is not None
    stated = {"dram_efficiency": 0.95, "compute_efficiency": 1.0}
    cpu = MACHINE.cpu.model_copy(update={"rates": rates, **stated, "vector_tflop_per_s": 2.0, "tile_rows": 16})
    return System(**{**dict(MACHINE), "cpu": cpu}).with_engine(engine)


def test_an_engine_leaves_rates_alone_that_experts_reached() -> None:
    """With the same engine, only the machine that states peaks is slowed down by its share of them."""
    run = plan_run(mixtral(), machine("reached"), recording(), "all-cpu")
    plain = machine("peak").with_engine("ktransformers")
    assert plain.engine is not None
    none = dict.fromkeys(("cpu_efficiency", "cpu_compute_efficiency"))
    sources = {key: source for key, source in plain.engine.sources.items() if key not in none}
    left = plain.engine.model_copy(update={**none, "cpu_units": "matrix", "sources": sources})
    under = machine("reached", "ktransformers")
    assert run.price(under).tpot_mean_s == run.price(plain.with_engine(left)).tpot_mean_s
    assert run.price(plain).tpot_mean_s > 1.3 * run.price(under).tpot_mean_s
    assert oracle.largest_difference(run.price(under), oracle.per_pick(run, under)) < 1e-12


def test_what_counts_is_what_can_be_set() -> None:
    """Keys of the CPU are settable where its rates were reached, and those of the engine are where they are peaks."""
    for rates, counts, idle in (("peak", "engine.cpu_efficiency", "cpu.dram_efficiency"),
                                ("reached", "cpu.dram_efficiency", "engine.cpu_efficiency")):  # fmt: skip
        system = machine(rates, "ktransformers")
        assert counts in system.numeric_keys()
        assert system.idle(counts) is None
        assert system.replaced_by(idle) is not None or system.idle(idle) is not None
    with pytest.raises(SpecError, match=r"cpu\.rates.*reached"):
        machine("reached", "ktransformers").check_set(["engine.cpu_efficiency"])


def test_numeric_keys_are_those_that_count() -> None:
    """What an engine replaces is no number of the system, and every number left changes a value when it is set."""
    bare = machine("peak")
    under = machine("peak", "llama-cpp-cuda")
    assert set(OF_CPU) <= set(bare.numeric_keys())
    assert {key for key in under.numeric_keys() if under.replaced_by(key) is not None} == set()
    gone = set(bare.numeric_keys()) - set(under.numeric_keys())
    assert gone
    assert gone <= set(REPLACED)
    assert all(np.isfinite(under.get(key)) for key in under.numeric_keys())
