"""What plans on one replay share, and the loops over its picks, against plain loops."""

import dataclasses
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal, assert_equal
from strategies import (
    NDP_SYSTEM,
    decode_rows,
    mixtral,
    models,
    plain_model,
    policy_texts,
    recording,
    small_trace,
    traces,
)

from perfmodel.errors import PerfModelError
from perfmodel.kernels.picks import look_up, number_rows
from perfmodel.policies import parse_policy
from perfmodel.routing import Replay, RoutingTrace
from perfmodel.run import Run, make_replay, plan_run

SHARED = (
    "decode_offsets",
    "decode_ids",
    "assigned",
    "all_assigned",
    "weight_rank",
    "weight_before",
    "max_context",
)


@given(st.data())
def test_decode_picks_of_a_replay(data) -> None:
    trace = data.draw(traces(data.draw(models())))
    replay = trace.replay(data.draw(st.sampled_from([None, 9])), data.draw(st.sampled_from([None, 11])))
    every, known, longest = [], [], []
    for s in range(replay.trace.num_sequences):
        ids, assigned, _ = decode_rows(replay.trace, s)
        start, stop = replay.decode_offsets[s : s + 2]
        assert stop - start == len(ids)
        every.append(np.where(assigned, ids, trace.num_experts))
        known.append(assigned)
        longest.append(int(replay.context_start[s]) + len(ids))
    assert_array_equal(replay.decode_ids, np.concatenate(every))
    assert_array_equal(replay.assigned, np.concatenate(known))
    assert replay.decode_offsets[0] == 0
    assert replay.decode_offsets[-1] == len(replay.decode_ids)
    assert replay.all_assigned == all(part.all() for part in known)
    assert replay.max_context == max(longest)


@pytest.mark.parametrize("experts", [255, 256, 65535])
def test_an_unassigned_pick_is_no_expert_whatever_the_width_of_ids(experts: int) -> None:
    trace = RoutingTrace(
        topk_ids=np.array([[[0, experts - 1]], [[experts - 1, -1]]]),
        topk_weights=None,
        sequence_offsets=np.array([0, 2]),
        prompt_len=np.array([0]),
        layer_index=np.array([0]),
        num_experts=experts,
        metadata={"model": "hand", "source": "synthetic"},
    )
    replay = trace.replay()
    assert replay.decode_ids.tolist() == [[[0, experts - 1]], [[experts - 1, experts]]]
    assert replay.assigned.tolist() == [[[True, True]], [[True, False]]]
    assert not replay.all_assigned


@given(st.data())
def test_picks_are_ranked_by_weight(data) -> None:
    replay = data.draw(traces(data.draw(models()))).replay()
    start = 0
    for s in range(replay.trace.num_sequences):
        ids, assigned, weights = decode_rows(replay.trace, s)
        for t, layer in np.ndindex(ids.shape[:2]):
            there = [j for j in range(ids.shape[2]) if assigned[t, layer, j]]
            weight = {j: -j if weights is None else float(weights[t, layer, j]) for j in there}
            ranked = sorted(there, key=lambda j: (-weight[j], j))
            expected = [ranked.index(j) if j in there else ids.shape[2] for j in range(ids.shape[2])]
            assert replay.weight_rank[start + t, layer].tolist() == expected
            before = replay.weight_before[start + t, layer]
            assert [before[j] for j in ranked] == sorted(before[j] for j in ranked)
            assert all(before[j] == 0 for j in range(ids.shape[2]) if j not in there or j == ranked[0])
        start += len(ids)


def test_what_is_shared_cannot_be_changed() -> None:
    replay = recording().replay(8, 5)
    for name in SHARED:
        value = getattr(replay, name)
        assert getattr(replay, name) is value
        if isinstance(value, np.ndarray):
            with pytest.raises(ValueError, match="read-only"):
                value[...] = 0


def test_a_pickled_replay_is_the_same_and_no_larger_after_use() -> None:
    replay = recording().replay(8, 5)
    before = pickle.dumps(replay)
    values = {name: getattr(replay, name) for name in SHARED}
    after = pickle.dumps(replay)
    assert len(before) == len(after)
    copy = pickle.loads(after)
    assert isinstance(copy, Replay)
    assert copy.notes == replay.notes
    assert_array_equal(copy.context_start, replay.context_start)
    for name, value in values.items():
        assert_equal(getattr(copy, name), value)


# --- plans that share ---


def everything(run: Run) -> dict[str, Any]:
    """Every decision of a run, and its states."""
    plan = {field.name: getattr(run.plan, field.name) for field in dataclasses.fields(run.plan)}
    prefill = None if run.prefill is None else run.prefill._asdict()
    return {**plan, "decode": run.decode._asdict(), "prefill": prefill}


@settings(max_examples=40)
@given(st.data())
def test_a_plan_does_not_depend_on_the_plans_before_it(data) -> None:
    model = data.draw(models())
    trace = data.draw(traces(model, min_sequences=2, prefill=True))
    prompt, output = data.draw(st.sampled_from([None, 9])), data.draw(st.sampled_from([None, 11]))
    shared = make_replay(model, trace, prompt, output)
    for text in data.draw(st.lists(policy_texts(model), min_size=2, max_size=5)):
        policy = parse_policy(
            text if trace.topk_weights is not None else text.replace("split=gates", "split=published")
        )
        together = everything(plan_run(model, NDP_SYSTEM, shared, policy))
        alone = everything(
            plan_run(model, NDP_SYSTEM, dataclasses.replace(trace), policy, prompt=prompt, output=output)
        )
        assert_equal(together, alone)


def test_a_refused_plan_spoils_nothing() -> None:
    model = mixtral("mixtral-8x22b")
    replay = make_replay(model, recording(), 32, 8, "cycle")
    for text in ("context-aware:gpu_experts=8", "monde:resident=8"):
        with pytest.raises(PerfModelError, match="does not fit"):
            plan_run(model, NDP_SYSTEM, replay, text)
    found = everything(plan_run(model, NDP_SYSTEM, replay, "context-aware"))
    fresh = everything(plan_run(model, NDP_SYSTEM, make_replay(model, recording(), 32, 8, "cycle"), "context-aware"))
    assert_equal(found, fresh)


# --- loops over picks ---


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 6), st.data())
def test_picks_find_the_class_of_their_expert(lengths, layers, experts, data) -> None:
    width = data.draw(st.integers(1, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    offsets = np.cumsum([0, *lengths])
    ids = rng.integers(0, experts + 1, (offsets[-1], layers, width)).astype(np.uint16)
    classes = rng.integers(0, 256, (len(lengths), layers, experts + 1)).astype(np.uint8)
    found = look_up(classes, offsets, ids)
    sequence = [s for s, length in enumerate(lengths) for _ in range(length)]
    for t, layer, j in np.ndindex(ids.shape):
        assert found[t, layer, j] == classes[sequence[t], layer, ids[t, layer, j]]


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_rows_are_numbered_by_rising_key_and_counted(tokens, layers, width, num_classes, seed) -> None:
    picks = np.random.default_rng(seed).integers(0, num_classes, (tokens, layers, width)).astype(np.uint8)
    digit = (width + 1) ** np.arange(num_classes)
    row, keys, count = number_rows(picks, digit, (width + 1) ** num_classes)
    expected = Counter(sum(int(digit[c]) for c in cell) for cell in picks.reshape(-1, width).tolist())
    assert keys.tolist() == sorted(expected)
    assert count.tolist() == [expected[key] for key in sorted(expected)]
    for t, layer in np.ndindex(row.shape):
        assert keys[row[t, layer]] == sum(int(digit[c]) for c in picks[t, layer])


def test_a_wide_table_gives_the_same_states_as_sorting() -> None:
    # Nine classes a pick make more keys than a table may hold, six do not: both must find the same rows.
    model = plain_model(num_layers=4, num_experts=40, top_k=8)
    trace = small_trace(model, [(9, 30), (4, 25)], seed=8, unassigned=0.1)
    for text in ("context-aware:gpu_experts=6,mean_bits=2.5", "hobbit:cache_high=9,cache_low=4,prefetch_accuracy=0.5"):
        run = plan_run(model, NDP_SYSTEM, trace, text)
        work = run.plan.picks
        if run.plan.copies is not None:
            work = np.concatenate([work, run.plan.copies], axis=2)
        rows = [tuple(sorted(cell)) for cell in work.reshape(-1, work.shape[2]).tolist()]
        states = run.decode
        found = []
        for state in states.state_id.reshape(-1):
            place = states.state_row[state]
            part = slice(states.row_offsets[place], states.row_offsets[place + 1])
            counts = states.row_count[part].astype(int)
            found.append(tuple(np.repeat(states.row_work[part], counts).tolist()))
        assert found == rows
