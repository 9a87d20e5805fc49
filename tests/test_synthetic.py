"""The synthetic routing generator: it is reproducible, honest about itself, and has the statistics asked for."""

import hashlib
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.errors import TraceError
from perfmodel.kernels.generate import sticky_top
from perfmodel.routing import RoutingTrace
from perfmodel.routing.moments import heaviest_picks, lru_rates, nearest_token, next_layer_recall, token_rates
from perfmodel.routing.presets import PRESETS
from perfmodel.routing.statistics import (
    adjacent_overlap,
    hit_rate_controls,
    load_cosine,
    selection_counts,
    top_share,
)
from perfmodel.routing.synthetic import MIXTRAL_SKEW, Skew, generate
from perfmodel.routing.synthetic_checks import check_size

EARLIER = {"plain": "90b9d4ea905c5ac9", "skewed": "c9872ef576fca7f4", "decode": "b2e7ab0415fae5cd"}

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


def test_negative_stickiness_keeps_neighbours_apart() -> None:
    trace = generate(4, 1, 2000, 4, 8, 2, stickiness=-1.0, memory_tokens=0.5)
    reuse = [float(adjacent_overlap(trace, lag=lag).measured.mean()) for lag in (1, 32)]
    assert reuse[0] < 0.18
    np.testing.assert_allclose(reuse[1], 0.25, rtol=0.05, atol=0)


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


@given(
    tokens=st.integers(1, 6),
    layers=st.integers(1, 3),
    experts=st.integers(1, 9),
    data=st.data(),
    seed=st.integers(0, 2**32),
)
def test_picks_are_those_of_a_plain_sort(
    tokens: int, layers: int, experts: int, data: st.DataObject, seed: int
) -> None:
    groups = data.draw(
        st.sampled_from([g for g in range(1, experts + 1) if experts % g == 0 and g <= experts // 2] or [1])
    )
    kept = data.draw(st.integers(1, groups))
    each = experts // groups
    top_k = data.draw(st.integers(1, kept * each))
    fading = data.draw(st.floats(0, 1))
    rng = np.random.default_rng(seed)
    # Few distinct values, so that scores are equal often.
    noise = rng.integers(0, 4, (tokens, layers, experts)) / 2
    log_p, stickiness = rng.integers(-2, 3, (layers, experts)) / 2, rng.integers(0, 3, layers) / 2
    if groups == 1:
        log_p[:, top_k:] = np.where(rng.random((layers, experts - top_k)) < 0.3, -np.inf, log_p[:, top_k:])
    memory, age = rng.random((layers, experts)), {}
    ids, best = np.empty((tokens, layers, top_k), np.uint16), np.empty((tokens, layers, top_k))
    for layer in range(layers):
        for expert in range(experts):
            age[layer, expert] = memory[layer, expert]
    order_noise = rng.integers(0, 3, layers) / 2
    sticky_top(noise, log_p, stickiness, order_noise, fading, groups, kept, memory, ids, best)
    for token in range(tokens):
        for layer in range(layers):

            def score(e: int, weight: float, token: int = token, layer: int = layer) -> float:
                return float(log_p[layer, e] + weight * noise[token, layer, e] + stickiness[layer] * age[layer, e])

            # Sorting is stable: equal ones stay in the order of their numbers, and then of their scores.
            best_two = [sum(sorted(score(e, 1.0) for e in range(g, g + each))[-2:]) for g in range(0, experts, each)]
            open_groups = sorted(range(groups), key=lambda g: -best_two[g])[:kept]
            free = [e for e in range(experts) if e // each in open_groups]
            chosen = sorted(free, key=lambda e: -score(e, 1.0))[:top_k]
            wanted = sorted(chosen, key=lambda e: -score(e, order_noise[layer]))
            assert ids[token, layer].tolist() == wanted
            assert best[token, layer].tolist() == [score(e, order_noise[layer]) for e in wanted]
            for expert in range(experts):
                age[layer, expert] = 1.0 if expert in ids[token, layer] else age[layer, expert] * fading
    assert memory.ravel().tolist() == list(age.values())


def test_grouped_routing_touches_no_more_groups_than_it_keeps() -> None:
    arguments: dict[str, Any] = {"alpha": 4.0, "sequence_concentration": 50.0, "stickiness": 0.3, "seed": 3}
    grouped = generate(2, 40, 40, 3, 256, 8, expert_groups=8, kept_groups=4, **arguments)
    free = generate(2, 40, 40, 3, 256, 8, **arguments)
    touched = [[len(set((row // 32).tolist())) for row in trace.topk_ids.reshape(-1, 8)] for trace in (grouped, free)]
    assert max(touched[0]) == 4
    assert max(touched[1]) > 5
    # A token still has 8 different experts; how evenly a token's work spreads over the groups is what changes.
    for trace in (grouped, free):
        assert all(len(set(row.tolist())) == 8 for row in trace.topk_ids.reshape(-1, 8))
    assert np.mean(touched[0]) < np.mean(touched[1]) - 1
    assert grouped.metadata["parameters"]["kept_groups"] == 4
    same = generate(2, 40, 40, 3, 256, 8, expert_groups=8, kept_groups=8, **arguments)
    assert (same.topk_ids == free.topk_ids).all()


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"expert_groups": 8, "kept_groups": 1}, "expert_groups is 8, allowed at most 4"),
        ({"expert_groups": 3, "kept_groups": 1}, "allowed a divisor of num_experts, 8"),
        ({"expert_groups": 2, "kept_groups": 3}, "kept_groups"),
        ({"expert_groups": 4, "kept_groups": 1}, "kept_groups is 1, allowed at least 2"),
        ({"expert_groups": True}, "expert_groups"),
        ({"expert_groups": 4, "kept_groups": 2, "layer_profile": [0, 1, 1, 1, 1, 1, 1, 1]}, "never picked"),
    ],
)
def test_groups_that_leave_no_top_k_are_refused(groups: dict[str, Any], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        generate(1, 4, 4, 2, 8, 3, **groups)


def test_earlier_results_stay() -> None:
    """Digests of picks that the first version of the generator drew."""
    traces = {
        "plain": small(seed=1),
        "skewed": small(seed=1, alpha=2.0, sequence_concentration=9.0, stickiness=0.7),
        "decode": small(seed=1, layer_profile=np.arange(1.0, 7), decode_concentration=4.0),
    }
    digests = {name: hashlib.sha256(trace.topk_ids.tobytes()).hexdigest()[:16] for name, trace in traces.items()}
    assert digests == EARLIER
    usual = {"alpha", "sequence_concentration", "decode_concentration", "stickiness"}
    assert traces["skewed"].metadata["parameters"].keys() == usual


def test_less_noise_in_the_order_changes_the_order_alone() -> None:
    arguments: dict[str, Any] = {
        "num_sequences": 8, "output": 400, "num_layers": 2, "num_experts": 8, "alpha": 3.0, "stickiness": 0.3,
    }  # fmt: skip
    plain, some, none = (small(order_noise=share, **arguments) for share in (1.0, 0.5, [0.0, 1.0]))
    for other in (some, none):
        np.testing.assert_array_equal(np.sort(other.topk_ids), np.sort(plain.topk_ids))
        assert other.topk_weights is not None
        assert (np.diff(other.topk_weights) <= 0).all()
    np.testing.assert_array_equal(none.topk_ids[:, 1], plain.topk_ids[:, 1])
    first = [heaviest_picks(of) for of in (plain, some, none)]
    rates = [lru_rates(of).mean((1, 2)) for of in first if of is not None]
    assert (rates[1] > rates[0] + 0.01).all()
    layer = [lru_rates(of)[..., 0].mean(1) for of in first if of is not None]
    assert (layer[2] > layer[1] + 0.01).all()
    assert plain.content_hash() == small(**arguments).content_hash()
    assert "order_noise" not in plain.metadata["parameters"]
    assert none.metadata["parameters"]["order_noise"] == [0.0, 1.0]


def test_tokens_that_come_again_have_the_same_experts_in_all_layers() -> None:
    arguments: dict[str, Any] = {"num_sequences": 4, "output": 900, "num_layers": 8, "num_experts": 16, "prompt": 100}
    never, often = (small(repeats=share, **arguments) for share in (0.0, 0.6))
    for s in range(4):
        for trace, least, most in ((never, 0.0, 0.01), (often, 0.56, 0.64)):
            rows = trace.topk_ids[trace.sequence_offsets[s] : trace.sequence_offsets[s + 1]].reshape(1000, -1)
            seen = [bool((rows[max(t - 256, 0) : t] == rows[t]).all(1).any()) for t in range(256, 1000)]
            assert least <= np.mean(seen) <= most, np.mean(seen)
    assert nearest_token(often).mean() > nearest_token(never).mean() + 0.1
    assert token_rates(often).std() > token_rates(never).std() + 0.015
    share = selection_counts(often, "decode").sum(0) / 3600
    np.testing.assert_allclose(share.mean(0), 1 / 8, rtol=0.4, atol=0)
    assert never.content_hash() == small(**arguments).content_hash()
    assert often.metadata["parameters"]["repeats"] == 0.6
    always = small(repeats=1.0, **arguments).topk_ids[:1000].reshape(1000, -1)
    assert all((always[t - 256 : t] == always[t]).all(1).any() for t in range(256, 1000))
    # More tokens, in other blocks, change nothing before them.
    short = small(repeats=0.6, **{**arguments, "output": 300})
    np.testing.assert_array_equal(short.topk_ids[:400], often.topk_ids[:400])


def test_lengths_may_differ_between_sequences() -> None:
    arguments = {"stickiness": 0.5, "alpha": 2.0, "sequence_concentration": 10.0, "num_sequences": 3}
    trace = small(prompt=[4, 0, 6], output=np.array([0, 5, 2]), **arguments)
    np.testing.assert_array_equal(trace.prompt_len, [4, 0, 6])
    np.testing.assert_array_equal(trace.sequence_lengths, [4, 5, 8])
    alike = small(prompt=6, output=2, **arguments)
    np.testing.assert_array_equal(trace.sequences([2]).topk_ids, alike.sequences([2]).topk_ids)


def test_one_number_a_layer() -> None:
    arguments = {"num_sequences": 20, "output": 300, "prompt": 0, "alpha": math.inf, "seed": 2}
    trace = small(stickiness=[0.0, 0.0, 2.0], sequence_concentration=[math.inf, 5.0, math.inf], **arguments)
    reuse = adjacent_overlap(trace)
    share = top_share(selection_counts(trace, "decode")).mean(0)
    np.testing.assert_allclose(reuse.measured[0], 1 / 3, rtol=0.03, atol=0)
    assert reuse.measured[2] > reuse.chance[2] + 0.15
    assert share[1] > share[0] + 0.15
    alike = small(stickiness=[0.5] * 3, **arguments)
    assert alike.content_hash() == small(stickiness=0.5, **arguments).content_hash()
    assert trace.metadata["parameters"]["stickiness"] == [0.0, 0.0, 2.0]
    assert trace.metadata["parameters"]["sequence_concentration"] == ["inf", 5.0, "inf"]


def test_memory_says_how_fast_stickiness_fades() -> None:
    def left(memory: float) -> float:
        """Part of the reuse above chance that is left after three more tokens."""
        trace = generate(4, 0, 2000, 4, 8, 2, stickiness=1.0, memory_tokens=memory)
        near, far = (float(adjacent_overlap(trace, lag=lag).measured.mean()) - 0.25 for lag in (1, 4))
        assert near > 0.03
        return far / near

    short, middle, long = left(0.3), left(2.0), left(8.0)
    assert abs(short) < 0.15 < middle
    assert middle + 0.1 < long


def test_partners_make_layers_predictable_and_change_nothing_within_one() -> None:
    arguments: dict[str, Any] = {"alpha": 9.0, "stickiness": 0.3, "seed": 4}
    traces = [generate(10, 0, 600, 5, 8, 2, next_layer=share, **arguments) for share in (0.0, 0.5, 1.0)]
    recall = [float(next_layer_recall(trace).mean()) for trace in traces]
    assert recall[0] < recall[1] - 0.1 < recall[2] - 0.2
    assert recall[2] > 0.8
    shares = [selection_counts(trace, "decode").sum(0) / trace.num_tokens for trace in traces]
    reuse = [adjacent_overlap(trace).measured for trace in traces]
    for other in (1, 2):
        np.testing.assert_allclose(shares[other], shares[0], rtol=0.12, atol=0.01)
        np.testing.assert_allclose(reuse[other], reuse[0], rtol=0.08, atol=0)
        # The first layer has no layer before.
        np.testing.assert_array_equal(traces[other].topk_ids[:, 0], traces[0].topk_ids[:, 0])


def test_partners_of_alike_layers_are_the_same_expert_by_rank() -> None:
    profile = np.array([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]])
    trace = generate(1, 0, 500, 2, 4, 1, layer_profile=profile, next_layer=1.0)
    np.testing.assert_array_equal(trace.topk_ids[:, 1, 0], 3 - trace.topk_ids[:, 0, 0])


def test_phases_may_have_profiles_of_their_own() -> None:
    first, second = np.array([8.0, 1.0, 1.0, 1.0]), np.array([1.0, 1.0, 1.0, 8.0])
    trace = generate(1, 20000, 20000, 2, 4, 1, layer_profile=first, decode_profile=second)
    for phase, wanted in (("prefill", first), ("decode", second)):
        share = selection_counts(trace, phase)[0] / 20000  # type: ignore[arg-type]
        np.testing.assert_allclose(share, np.tile(wanted / 11, (2, 1)), rtol=0.1, atol=0)
    assert trace.metadata["decode_profile"] == "given"

    shifted = generate(30, 400, 400, 4, 8, 2, alpha=2.0, phase_concentration=10.0)
    found = hit_rate_controls(shifted, 4, selection_counts(shifted, "prefill"))
    assert found.static is not None
    assert found.static > found.own + 0.05  # what other sequences do in decode says more than one's own prefill
    assert shifted.metadata["parameters"]["phase_concentration"] == 10.0


def test_a_sequence_keeps_its_own_ways_when_the_phase_changes() -> None:
    profile = np.array([0.4, 0.3, 0.2, 0.1, 0.0])
    decode = np.array([0.1, 0.2, 0.3, 0.2, 0.2])
    arguments: dict[str, Any] = {"layer_profile": profile, "sequence_concentration": 3.0, "seed": 8}
    trace = generate(1, 30000, 30000, 1, 5, 1, decode_profile=decode, decode_concentration=math.inf, **arguments)
    before, after = (selection_counts(trace, phase)[0, 0] / 30000 for phase in ("prefill", "decode"))
    wanted = np.append(before[:4] * decode[:4] / profile[:4], decode[4])
    np.testing.assert_allclose(after, wanted / wanted.sum(), rtol=0.1, atol=0.003)
    assert before[4] == 0


def test_labels_have_profiles() -> None:
    profiles = {"a": [1.0, 0.0, 0.0], "b": [0.0, 1.0, 0.0]}
    turns = generate(5, 2, 3, 2, 3, 1, layer_profile=profiles)
    assert turns.labels == ("a", "b", "a", "b", "a")
    assert turns.metadata["layer_profile"] == "given, by label"
    np.testing.assert_array_equal(turns.topk_ids[:5], 0)
    chosen = generate(3, 2, 3, 2, 3, 1, layer_profile=profiles, labels=["b", "b", "a"], decode_profile=profiles)
    assert chosen.labels == ("b", "b", "a")
    np.testing.assert_array_equal(chosen.topk_ids[:10], 1)
    np.testing.assert_array_equal(chosen.topk_ids[10:], 0)
    assert small(labels=["x", "y"]).labels == ("x", "y")


def test_sharpness_of_gates() -> None:
    flat, plain, sharp = (small(gate_sharpness=power, seed=2) for power in (0.5, 1.0, 2.0))
    for trace, power in ((flat, 0.5), (sharp, 2.0)):
        np.testing.assert_array_equal(trace.topk_ids, plain.topk_ids)
        assert plain.topk_weights is not None
        powers = plain.topk_weights.astype(float) ** power
        np.testing.assert_allclose(trace.topk_weights, powers / powers.sum(-1, keepdims=True), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_traces_of_their_shape(name: str) -> None:
    preset = PRESETS[name]
    trace = generate(
        2, 8, 8, preset.num_layers, preset.num_experts, preset.top_k, model=preset.model, **preset.skew._asdict()
    )
    assert trace.metadata["source"] == "synthetic"
    assert trace.metadata["parameter_source"] == preset.skew.parameter_source
    assert {number.kind for number in preset.numbers} <= {
        "published",
        "published, recalled",
        "measured",
        "fitted",
        "assumed",
    }
    assert all(number.source and number.value for number in preset.numbers)
    # Every parameter that is set is told about.
    told = " ".join(number.name for number in preset.numbers)
    usual = Skew(math.inf, math.inf, 0.0, "")._asdict()
    for key, value in preset.skew._asdict().items():
        if key != "parameter_source" and value != usual[key]:
            assert key.replace("_tokens", "").replace("_", "-").removesuffix("-concentration") in told, key


def preset_trace(name: str, sequences: int, prompt: int, output: int, layers: int) -> RoutingTrace:
    preset = PRESETS[name]
    skew = preset.skew._asdict()
    return generate(sequences, prompt, output, layers, preset.num_experts, preset.top_k, seed=5, **skew)


def test_preset_of_deepseek() -> None:
    trace = preset_trace("deepseek-v2-lite", 16, 900, 48, 12)
    reuse = [float(adjacent_overlap(trace, "prefill", lag).measured.mean()) for lag in (1, 2, 4, 8)]
    np.testing.assert_allclose(reuse, [0.290, 0.216, 0.188, 0.171], rtol=0, atol=0.05)
    found = hit_rate_controls(trace, 32, selection_counts(trace, "prefill"))
    measured = [found.own, found.other_sequence, found.static, found.oracle]
    np.testing.assert_allclose(measured, [0.653, 0.648, 0.774, 0.819], rtol=0, atol=0.05)
    assert trace.topk_weights is not None
    np.testing.assert_allclose(trace.topk_weights[..., 0].mean(), 0.324, rtol=0.05, atol=0)
    pooled = selection_counts(trace, "prefill").sum(0)
    np.testing.assert_allclose(top_share(pooled).mean(), 0.708, rtol=0, atol=0.05)
    np.testing.assert_allclose(next_layer_recall(trace).mean(), 0.538, rtol=0, atol=0.05)


def test_preset_of_gpt_oss() -> None:
    trace = preset_trace("gpt-oss-20b", 20, 200, 200, 12)
    counts = selection_counts(trace, "decode")
    shares = [top_share(counts.sum(0)).mean(), top_share(counts).mean()]
    np.testing.assert_allclose(shares, [0.827, 0.910], rtol=0, atol=0.05)
    reuse = [float(adjacent_overlap(trace, lag=lag).measured.mean()) for lag in (1, 2, 4, 8)]
    np.testing.assert_allclose(reuse, [0.457, 0.407, 0.381, 0.355], rtol=0, atol=0.05)
    found = hit_rate_controls(trace, 16, selection_counts(trace, "prefill"))
    np.testing.assert_allclose([found.own, found.oracle], [0.885, 0.921], rtol=0, atol=0.05)


def test_preset_of_qwen3() -> None:
    trace = preset_trace("qwen3-30b-a3b", 16, 0, 128, 12)
    np.testing.assert_allclose(adjacent_overlap(trace).measured.mean(), 0.427, rtol=0, atol=0.05)
    pooled = selection_counts(trace, "decode").sum(0)
    np.testing.assert_allclose(top_share(pooled, 16).mean(), 0.58, rtol=0, atol=0.05)
    ids = trace.topk_ids.reshape(16, 128, 12, 8)
    for tokens, wanted in ((8, 29.0), (32, 52.8), (128, 75.2)):
        distinct = [len(np.unique(ids[s, :tokens, layer])) for s in range(16) for layer in range(12)]
        np.testing.assert_allclose(np.mean(distinct) / 128, wanted / 128, rtol=0, atol=0.05)
    for batch, wanted in ((2, 15.0), (4, 26.6), (8, 42.6), (16, 59.2)):
        distinct = [len(np.unique(ids[:batch, step, layer])) for step in range(0, 128, 4) for layer in range(12)]
        np.testing.assert_allclose(np.mean(distinct) / 128, wanted / 128, rtol=0, atol=0.05)


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
        ({"stickiness": -100.1}, "stickiness is -100.1, expected -100 to 100"),
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
        ({"prompt": [1, 2, 3]}, "prompt has 3 entries, expected 2"),
        ({"prompt": [1, -2]}, "prompt holds -2"),
        ({"prompt": [1.0, 2.0]}, "prompt has dtype float64"),
        ({"prompt": [1, 2**60]}, "too large for memory"),
        ({"output": [0, 7], "prompt": [0, 5]}, "at least one token"),
        ({"sequence_concentration": [1.0, 2.0]}, r"sequence_concentration has shape \(2,\)"),
        ({"decode_concentration": [1.0, 2.0, 0.0]}, r"decode_concentration\[2\] is 0"),
        ({"stickiness": [0.0, -101.0, 0.0]}, r"stickiness\[1\] is -101"),
        ({"stickiness": ["a", 1, 1]}, r"stickiness\[0\] is 'a'"),
        ({"memory_tokens": 0}, "memory_tokens is 0"),
        ({"next_layer": 1.1}, "next_layer is 1.1, expected 0 to 1"),
        ({"next_layer": math.nan}, "next_layer is nan"),
        ({"phase_concentration": -1}, "phase_concentration is -1"),
        ({"gate_sharpness": 0}, "gate_sharpness is 0, expected 0.001 to 1000"),
        ({"order_noise": 1.1}, "order_noise is 1.1, expected 0 to 1"),
        ({"order_noise": [1.0, 0.5]}, r"order_noise has shape \(2,\)"),
        ({"repeats": -0.1}, "repeats is -0.1, expected 0 to 1"),
        ({"decode_profile": [1, 2]}, "decode_profile has shape"),
        ({"layer_profile": {}}, "layer_profile has no labels"),
        ({"layer_profile": {"": np.ones(6)}}, "expected texts that are not empty"),
        ({"layer_profile": {"a": [1, 2]}}, r"layer_profile\['a'\] has shape"),
        ({"layer_profile": {"a": np.ones(6)}, "decode_profile": np.ones(6)}, "expected the same"),
        ({"layer_profile": {"a": np.ones(6)}, "labels": ["a", "b"]}, "label 'b' has no profile"),
        ({"labels": ["a"]}, "expected a list of one text for each of 2 sequences"),
        ({"labels": "ab"}, "labels is 'ab', expected a list"),
        ({"labels": 5}, "labels is 5, expected a list"),
        ({"labels": ["a", 5]}, "label"),
        ({"labels": ["a", []], "layer_profile": {"a": np.ones(6)}}, "has no profile"),
        ({"stickiness": [[1], [2, 3], 1]}, r"stickiness\[0\] is \[1\], expected a number"),
        ({"stickiness": np.ones((3, 1))}, r"stickiness has shape \(3, 1\)"),
        ({"layer_profile": {5: np.ones(6)}}, "expected texts that are not empty"),
    ],
)
def test_bad_parameters(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        small(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{}, {"next_layer": 0.5}, {"repeats": 0.5}, {"next_layer": 0.5, "repeats": 0.5}])
def test_memory_is_counted(options: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused as too large is about what generating takes: never much less, and no more than three times."""
    generate(1, 0, 2, 8, 128, 2, **options)  # compiled and imported before anything is measured
    tracemalloc.start()
    try:
        generate(1, 0, 1024, 8, 128, 2, **options)
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    used = {name: name in options for name in ("next_layer", "repeats")}
    monkeypatch.setattr("perfmodel.routing.synthetic_checks.MAX_BYTES", int(0.9 * taken))
    with pytest.raises(TraceError, match="too large for memory"):
        check_size(np.array([1024]), 8, 128, 2, **used)
    monkeypatch.setattr("perfmodel.routing.synthetic_checks.MAX_BYTES", 3 * taken)
    check_size(np.array([1024]), 8, 128, 2, **used)
