"""What is known before a batch begins: how the sequences outside it use the experts, each counted once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from strategies import NDP_SYSTEM, mixtral, models, plain_model, recording, small_trace, traces

from perfmodel import placement
from perfmodel.errors import PolicyError, TraceError
from perfmodel.policies.hosted import most_used
from perfmodel.routing import statistics
from perfmodel.routing.prediction import activation_matches, table_prediction
from perfmodel.run import make_replay, plan_run

DESKTOP = "rtx4090-pcie4-cpu"


@settings(max_examples=40)
@given(st.data(), st.integers(2, 5))
def test_a_profile_counts_the_sequences_outside_each_group_once(data: st.DataObject, batch: int) -> None:
    model = data.draw(models())
    trace = data.draw(traces(model, min_sequences=2))
    replay = make_replay(model, trace, output=5, batch=batch)
    single = make_replay(model, trace, output=5).trace
    count, own = single.num_sequences, placement.importance(single, phase="decode").values
    if batch >= count:
        assert not replay.outside.any()
        with pytest.raises(PolicyError, match=f"at least {batch + 1} sequences, found {count}"):
            placement.importance_of_others(replay)
        return
    found = placement.importance_of_others(replay).values
    assert len(found) == -(-count // batch)
    for group, values in enumerate(found):
        held = {place % count for place in range(group * batch, (group + 1) * batch)}
        others = [own[one] for one in range(count) if one not in held]
        assert len(others) == count - batch
        assert_allclose(values, np.mean(others, axis=0), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("batch", [1, 2, 4, 5])
def test_popular_experts_are_those_of_the_sequences_outside(batch: int) -> None:
    run = plan_run(mixtral(), DESKTOP, recording(), "fiddler:bits=4,experts=40", output=12, batch=batch)
    counts = statistics.selection_counts(run.replay.single.trace, "decode").astype(np.float64)
    for group in range(run.replay.trace.num_sequences):
        held = {place % 6 for place in range(group * batch, (group + 1) * batch)}
        hot = most_used(sum(counts[one] for one in range(6) if one not in held)[None], 40)[0]
        start, stop = run.replay.decode_offsets[group : group + 2]
        ids = run.replay.decode_ids[start:stop]
        on_gpu = np.array([work.executor.name == "GPU" for work in run.plan.classes])[run.plan.picks[start:stop]]
        assert_array_equal(on_gpu, hot[np.arange(ids.shape[1])[:, None], ids])
    where = "the other sequences" if batch == 1 else f"the {6 - batch} of 6 sequences that are outside each group"
    assert f"experts placed by the decode steps of {where}" in run.plan.notes


@pytest.mark.parametrize("batch", [6, 7])
@pytest.mark.parametrize(
    ("policy", "system"),
    [
        ("fiddler:bits=4", DESKTOP),
        ("static", NDP_SYSTEM),
        ("hybrimoe:bits=4", DESKTOP),
        ("moe-infinity:bits=4", DESKTOP),
    ],
)
def test_a_batch_of_all_sequences_says_so(policy: str, system: str, batch: int) -> None:
    run = plan_run(mixtral(), system, recording(), policy, prompt=8, output=4, batch=batch)
    assert not any("the trace has one sequence" in note for note in run.plan.notes)
    if "infinity" not in policy:
        assert any(note.startswith(f"a batch of {batch} holds all 6 sequences of the trace") for note in run.plan.notes)


def test_a_batch_of_all_sequences_without_prompts_is_refused() -> None:
    model = plain_model()
    bare = small_trace(model, [(0, 4), (0, 5)], seed=1)
    with pytest.raises(PolicyError, match=r"a batch of 2 holds all 2 sequences.* allowed: at least 3 sequences"):
        plan_run(model, NDP_SYSTEM, bare, "static", batch=2)
    plan_run(model, NDP_SYSTEM, bare, "static")
    with pytest.raises(TraceError, match="no prediction for group 0"):
        table_prediction(make_replay(model, bare, batch=2), 1)


def test_predictions_learn_from_the_sequences_outside() -> None:
    model = plain_model(num_experts=8)
    trace = small_trace(model, [(4, 10)] * 5, seed=2)
    batched = make_replay(model, trace, batch=2)
    library, best = activation_matches(batched)
    assert len(library) == 5
    for group, held in enumerate(({0, 1}, {2, 3}, {4, 0})):
        assert not held & set(best[20 * group : 20 * group + 20].tolist())
    # Beside a third sequence alone, the table of a pair is that of each of the two.
    pair = make_replay(model, trace.sequences([0, 1, 2]), batch=2)
    expected = [table_prediction(make_replay(model, trace.sequences([one, 2])), 3)[:10] for one in (0, 1)]
    assert_array_equal(table_prediction(pair, 3)[:20], np.stack(expected, axis=1).reshape(20, *expected[0].shape[1:]))


def test_a_batch_holds_no_sequence_more_often_than_it_has_steps() -> None:
    model = plain_model()
    trace = small_trace(model, [(2, 3), (2, 4)], seed=1)
    assert make_replay(model, trace, batch=6).trace.num_sequences == 1
    with pytest.raises(TraceError, match=r"^batch: found 100000, allowed up to 6: [^\n]*$"):
        make_replay(model, trace, batch=100_000)
