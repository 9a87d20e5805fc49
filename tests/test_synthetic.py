"""The synthetic routing generator: it is reproducible, honest about itself, and has the statistics asked for."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.errors import TraceError
from perfmodel.routing import RoutingTrace
from perfmodel.routing.statistics import (
    adjacent_overlap,
    hit_rate_controls,
    load_cosine,
    selection_counts,
    top_share,
)
from perfmodel.routing.synthetic import MIXTRAL_SKEW, generate

positive = st.floats(1e-3, 1e4) | st.sampled_from([1e-300, 1e300, math.inf])


def small(**changes: Any) -> RoutingTrace:
    arguments = {"num_sequences": 2, "prompt": 5, "output": 7, "num_layers": 3, "num_experts": 6, "top_k": 2}
    return generate(**{**arguments, **changes})


@given(
    sequences=st.integers(1, 3),
    prompt=st.integers(0, 4),
    output=st.integers(1, 5),
    layers=st.integers(1, 3),
    experts=st.integers(1, 12),
    data=st.data(),
    alpha=positive,
    concentration=positive,
    decode=st.none() | positive,
    stickiness=st.floats(0, 5),
    seed=st.integers(0, 2**64),
)
@settings(max_examples=120)
def test_any_parameters_give_a_correct_trace(
    sequences: int,
    prompt: int,
    output: int,
    layers: int,
    experts: int,
    data: st.DataObject,
    alpha: float,
    concentration: float,
    decode: float | None,
    stickiness: float,
    seed: int,
) -> None:
    top_k = data.draw(st.integers(1, experts))
    trace = generate(
        sequences,
        prompt,
        output,
        layers,
        experts,
        top_k,
        alpha=alpha,
        sequence_concentration=concentration,
        decode_concentration=decode,
        stickiness=stickiness,
        seed=seed,
    )
    assert trace.topk_ids.shape == (sequences * (prompt + output), layers, top_k)
    assert trace.num_experts == experts
    assert (trace.topk_ids < experts).all()
    np.testing.assert_array_equal(trace.prompt_len, np.full(sequences, prompt))
    assert trace.topk_weights is not None
    np.testing.assert_allclose(trace.topk_weights.sum(-1), 1, rtol=1e-5, atol=0)
    assert (np.diff(trace.topk_weights, axis=-1) <= 0).all()
    assert trace.metadata["source"] == "synthetic"


def test_same_seed_same_trace() -> None:
    base = small(seed=3, stickiness=0.5, alpha=2.0, sequence_concentration=10.0)
    again = small(seed=3, stickiness=0.5, alpha=2.0, sequence_concentration=10.0)
    assert base.content_hash() == again.content_hash()
    other = small(seed=4, stickiness=0.5, alpha=2.0, sequence_concentration=10.0)
    assert not np.array_equal(base.topk_ids, other.topk_ids)


@pytest.mark.parametrize("stickiness", [0.0, 1.0])
def test_more_sequences_and_longer_outputs_extend_the_trace(stickiness: float) -> None:
    arguments = {"stickiness": stickiness, "alpha": 2.0, "sequence_concentration": 10.0, "prompt": 300}
    few, more = small(num_sequences=2, **arguments), small(num_sequences=4, **arguments)
    np.testing.assert_array_equal(more.sequences([0, 1]).topk_ids, few.topk_ids)
    longer = small(output=300, **arguments)
    for s in range(2):
        got = longer.sequences([s]).topk_ids[: 300 + 7]
        np.testing.assert_array_equal(got, few.sequences([s]).topk_ids)


def test_metadata_names_the_parameters() -> None:
    trace = small(**MIXTRAL_SKEW._asdict(), seed=5, model="as-if-mixtral")
    assert trace.metadata["model"] == "as-if-mixtral"
    assert trace.metadata["seed"] == 5
    assert trace.metadata["parameters"]["alpha"] == 9.1
    assert trace.metadata["parameters"]["decode_concentration"] == 60.0
    assert "assumed" in trace.metadata["parameter_source"]
    assert small().metadata["parameters"]["alpha"] == "inf"
    assert small(layer_profile=np.ones(6)).metadata["layer_profile"] == "given"
    assert "not a recording" in trace.replay().notes[0]


def statistics(**arguments: Any) -> tuple[float, float, float]:
    trace = generate(24, 128, 512, 4, 8, 2, seed=1, **arguments)
    prefill = selection_counts(trace, "prefill")
    own = hit_rate_controls(trace, 4, prefill).own
    return float(load_cosine(trace).mean()), own, float(adjacent_overlap(trace).measured.mean())


@pytest.mark.parametrize(
    ("concentration", "cosine", "hit", "reuse"),
    [(math.inf, 0.986, 0.595, 0.27), (60, 0.949, 0.643, 0.31), (20, 0.915, 0.720, 0.40), (10, 0.886, 0.783, 0.49)],
)
def test_statistics_of_an_independent_simulation(concentration: float, cosine: float, hit: float, reuse: float) -> None:
    found = statistics(alpha=9.0, sequence_concentration=concentration)
    np.testing.assert_allclose(found[0], cosine, rtol=0.015, atol=0)
    np.testing.assert_allclose(found[1], hit, rtol=0.03, atol=0)
    np.testing.assert_allclose(found[2], reuse, rtol=0.05, atol=0)


def test_stickiness_raises_reuse_and_fades() -> None:
    without = statistics(alpha=9.0, sequence_concentration=60)
    sticky = statistics(alpha=9.0, sequence_concentration=60, stickiness=0.5)
    assert 0.05 < sticky[2] - without[2] < 0.15
    assert abs(sticky[1] - without[1]) < 0.04
    trace = generate(4, 1, 3000, 4, 8, 2, stickiness=1.0)
    reuse = [float(adjacent_overlap(trace, lag=lag).measured.mean()) for lag in (1, 2, 4, 32)]
    assert reuse[0] > reuse[1] > reuse[2] > reuse[3]
    np.testing.assert_allclose(reuse[3], 0.25, rtol=0.05, atol=0)


def test_mixtral_skew() -> None:
    trace = generate(8, 64, 512, 32, 8, 2, **MIXTRAL_SKEW._asdict())
    pooled = selection_counts(trace, "decode").sum(0)
    np.testing.assert_allclose(top_share(pooled).mean(), 0.629, rtol=0.03, atol=0)
    np.testing.assert_allclose(adjacent_overlap(trace).measured.mean(), 0.35, rtol=0.05, atol=0)


def test_uniform_routing_is_uniform() -> None:
    trace = generate(2, 1000, 1000, 2, 8, 2)
    share = selection_counts(trace, "decode").sum(0) / 4000
    np.testing.assert_allclose(share, 1 / 8, rtol=0.15, atol=0)
    assert trace.topk_weights is not None
    np.testing.assert_allclose(trace.topk_weights[..., 0].mean(), 0.70, rtol=0.01, atol=0)


def test_layer_profile_is_followed() -> None:
    profile = np.array([[1.0, 3.0, 0.0, 4.0], [0.0, 1.0, 1.0, 0.0]])
    trace = generate(1, 0, 20000, 2, 4, 1, layer_profile=profile)
    share = selection_counts(trace, "decode")[0] / 20000
    wanted = profile / profile.sum(-1, keepdims=True)
    np.testing.assert_allclose(share[wanted > 0], wanted[wanted > 0], rtol=0.1, atol=0)
    assert (share[wanted == 0] == 0).all()
    varied = generate(2, 5, 5, 2, 4, 2, layer_profile=profile, sequence_concentration=5.0, stickiness=1.0)
    assert selection_counts(varied, "decode")[:, 0, 2].sum() == 0
    one_row = generate(1, 1, 1, 2, 4, 1, layer_profile=[0, 0, 7e300, 0])
    assert (one_row.topk_ids == 2).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_sequences": 0}, "num_sequences is 0"),
        ({"prompt": -1}, "prompt is -1"),
        ({"output": 2.5}, "output is 2.5"),
        ({"prompt": 0, "output": 0}, "at least one token"),
        ({"num_layers": True}, "num_layers is True"),
        ({"num_experts": 1}, r"top_k is 2, expected an integer in 1\.\.1"),
        ({"num_experts": 70000}, "num_experts is 70000"),
        ({"top_k": 7}, "top_k is 7"),
        ({"output": 10**15}, "too large for memory"),
        ({"num_sequences": 10**5000}, "too large for memory"),
        ({"alpha": 0}, "alpha is 0"),
        ({"alpha": -1.0}, "alpha is -1"),
        ({"alpha": math.nan}, "alpha is nan"),
        ({"alpha": True}, "alpha is True"),
        ({"alpha": "9"}, "alpha is '9'"),
        ({"alpha": 10**400}, "alpha is too large"),
        ({"sequence_concentration": 0.0}, "sequence_concentration is 0"),
        ({"decode_concentration": -math.inf}, "decode_concentration is -inf"),
        ({"stickiness": -0.1}, "stickiness is -0.1"),
        ({"stickiness": math.inf}, "stickiness is inf"),
        ({"stickiness": math.nan}, "stickiness is nan"),
        ({"stickiness": None}, "stickiness is None"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"seed": None}, "seed is None"),
        ({"layer_profile": np.ones((2, 6))}, "layer_profile has shape"),
        ({"layer_profile": [1, 2]}, "layer_profile has shape"),
        ({"layer_profile": [[1], [2, 3]]}, "no table of numbers"),
        ({"layer_profile": "abc"}, "no table of numbers"),
        ({"layer_profile": [1, 1, 1, 1, 1, math.nan]}, "finite frequencies"),
        ({"layer_profile": [1, 1, 1, 1, 1, math.inf]}, "finite frequencies"),
        ({"layer_profile": [1, 1, 1, 1, 1, -1]}, "finite frequencies"),
        ({"layer_profile": [0, 0, 0, 0, 0, 1]}, "at least 2 experts"),
        ({"model": ""}, "metadata.model"),
    ],
)
def test_bad_parameters(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        small(**changes)
    assert "\n" not in str(caught.value)
