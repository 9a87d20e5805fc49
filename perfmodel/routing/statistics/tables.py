"""What a survey adds up over the blocks of a trace, in two passes.

All tables have one row a group of sequences first, [G, ...], so that sequences can be resampled afterwards.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.blocks import NO_EXPERT, Block, TraceFile

Array = NDArray[Any]

MAX_GROUPS = 512
"""Most groups of sequences; with fewer sequences each is a group of its own."""
TABLE_BYTES = 2**27
"""Largest size of all tables by group together [byte], unless one group alone takes more, and of some others."""
MAX_CELLS = 2**20
"""Most experts of all layers together."""
PAIR_BYTES = 2**27
"""Largest table of pairs of experts of one layer and the next."""
MAX_UNITS = 128
"""Most units of sequences from which static profiles are chosen anew in resamples."""
MIN_UNITS = 8
UNIT_BYTES = 2**26
"""Largest table of their counts; for fewer than eight units, there are none."""
DRIFT_ROWS = 32
DRIFT_WINDOWS = 64
BATCH_SEQUENCES = 64
BATCH_STEPS = 256
BATCH_PICKS = 2**25
"""Most picks of the rows that batches are drawn from."""


@dataclass(frozen=True)
class Plan:
    """What is looked at, and how sequences are grouped and split.

    group : int64 [S]. splits : int64 [S], rows of a sequence that decode rows are compared with.
    usable : bool [S], sequences long enough on both sides of the split. after : rows after the split [S].
    capacities : int64 [n], numbers of placed experts. slot : int64 [E], see `kernels.compare.profiles`.
    drift_windows, drift_rows : how many windows of the output are looked at, and rows of each.
    units : of usable sequences whose decode counts are kept, to choose static profiles anew; 0 where they take too much
        room. unit : int64 [S], of each usable sequence.
    sampled : sequences whose first ``batch_steps`` decode rows are kept to draw batches from.
    """

    file: TraceFile
    lags: NDArray[np.int64]
    windows: NDArray[np.int64]
    groups: int
    group: NDArray[np.int64]
    splits: NDArray[np.int64]
    usable: NDArray[np.bool_]
    comparable: NDArray[np.bool_]
    capacities: NDArray[np.int64]
    slot: NDArray[np.int64]
    units: int
    unit: NDArray[np.int64]
    sampled: NDArray[np.int64]
    batch_steps: int
    drift_rows: int
    drift_windows: int
    with_pairs: bool

    def zeros(self, *shape: int, dtype: Any = np.int64) -> Array:
        """A table."""
        return np.zeros(shape, dtype)


def make_plan(file: TraceFile, lags: NDArray[np.int64], windows: NDArray[np.int64], min_decode: int, seed: int) -> Plan:
    """Decide what can be looked at in a trace."""
    layers, experts = file.num_layers, file.num_experts
    lengths = file.sequence_lengths
    splits = file.prompt_len if file.prompt_len.any() else lengths // 2
    after = lengths - splits
    if layers * experts > MAX_CELLS:
        raise TraceError(f"{layers} layers of {experts} experts are too many for a survey, at most {MAX_CELLS} in all")
    most = max(1, min(experts - 1, TABLE_BYTES // (8 * layers * experts)))
    # Sums of one group: picks; reuse, distinct experts, weights, cosines, hits and forecasts by layer; curves.
    each = layers * (2 * experts + 6 * len(lags) + 3 * len(windows) + file.top_k + 27) + 3 * experts + 6 * most
    groups = min(file.num_sequences, MAX_GROUPS, max(2, TABLE_BYTES // (8 * each)))
    group = np.arange(file.num_sequences) * groups // file.num_sequences
    if groups < file.num_sequences:
        # Neighbours are often alike, and groups shall not be.
        group = np.random.default_rng(seed).permutation(group)
    capacities = np.unique(np.linspace(1, max(experts - 1, 1), most).round().astype(np.int64))
    decoding = np.flatnonzero(lengths > file.prompt_len)
    kept = min(BATCH_SEQUENCES, len(decoding))
    usable = (splits > 0) & (after >= min_decode)
    several = int(usable.sum())
    units = min(several, MAX_UNITS, UNIT_BYTES // (3 * 8 * layers * experts))
    if units < min(several, MIN_UNITS):
        units = 0
    unit, numbers = np.zeros(file.num_sequences, np.int64), np.arange(several) * units // max(several, 1)
    unit[usable] = numbers if units == several else np.random.default_rng(seed).permutation(numbers)
    return Plan(
        file=file,
        lags=lags,
        windows=windows,
        groups=groups,
        group=group,
        splits=np.ascontiguousarray(splits),
        usable=usable,
        comparable=splits > 0,
        capacities=capacities,
        slot=np.searchsorted(capacities, np.arange(experts), side="right"),
        units=units,
        unit=unit,
        sampled=decoding[np.arange(kept) * len(decoding) // max(kept, 1)],
        batch_steps=max(1, min(BATCH_STEPS, BATCH_PICKS // (BATCH_SEQUENCES * layers * file.top_k))),
        drift_rows=DRIFT_ROWS,
        drift_windows=min(DRIFT_WINDOWS, int(after[splits > 0].max(initial=0)) // DRIFT_ROWS),
        with_pairs=layers > 1 and file.num_sequences > 1 and (layers - 1) * experts**2 * 8 <= PAIR_BYTES,
    )


class First:
    """Sums that need nothing but the rows, and what the second pass compares sequences with."""

    def __init__(self, plan: Plan) -> None:
        file, groups = plan.file, plan.groups
        layers, experts, lags, windows = file.num_layers, file.num_experts, len(plan.lags), len(plan.windows)
        zeros = plan.zeros
        self.plan = plan
        self.picks = zeros(groups, 2, layers, experts)
        self.repeats = zeros(groups, layers, 3, dtype=np.float64)
        self.repeats_asked = zeros(groups, layers, 3)
        self.shared, self.asked = zeros(groups, layers, 3, lags), zeros(groups, layers, 3, lags)
        self.distinct, self.whole = zeros(groups, layers, 3, windows), zeros(groups, 3, windows)
        self.weights = zeros(groups, layers, file.top_k, dtype=np.float64)
        self.weighted = zeros(groups, layers)
        self.lru, self.belady = zeros(groups, experts + 1), zeros(groups, experts + 1)
        self.lru_layers, self.belady_layers = zeros(layers, experts + 1), zeros(layers, experts + 1)
        self.directions, self.later_directions = (zeros(layers, experts, dtype=np.float64) for _ in range(2))
        self.directed = zeros(layers)
        self.placed = zeros(layers, experts, len(plan.capacities), dtype=np.int32)
        self.half_placed = zeros(layers, experts)
        self.pooled, self.alike, self.layers_alike = (zeros(layers, experts) for _ in range(3))
        self.kept = zeros(3, plan.units, layers, experts)
        self.added = 0
        pairs = (layers - 1, experts, experts) if plan.with_pairs else (0, 0, 0)
        self.pairs = zeros(*pairs, dtype=np.float64)
        self.own, self.following = zeros(*pairs[:2]), zeros(*pairs[:2])
        self.sample = np.full((len(plan.sampled), plan.batch_steps, layers, file.top_k), NO_EXPERT, np.uint16)
        self.sample_rows = np.minimum((file.sequence_lengths - file.prompt_len)[plan.sampled], plan.batch_steps)
        self._counts = zeros(2, layers, experts)
        self._compared = zeros(2, layers, experts)
        self._history, self._latest = zeros(layers, experts, dtype=np.uint64), zeros(layers, experts)
        self._pending = zeros(2, windows, layers)

    def add(self, block: Block) -> None:
        """Add the rows of a block."""
        from perfmodel.kernels import compare, forecast, reuse, tally

        plan, file = self.plan, self.plan.file
        offsets, prompts = file.sequence_offsets, file.prompt_len
        where = (block.ids, block.start, block.first, block.last, offsets)
        tally.reuse_and_windows(
            *where, prompts, plan.group, plan.lags, plan.windows, self._history, self._latest, self._pending,
            self.shared, self.asked, self.distinct, self.whole,
        )  # fmt: skip
        tally.picks_and_chance(
            *where, plan.splits, plan.group, self._counts, self.picks, self.repeats, self.repeats_asked
        )
        if block.weights is not None:
            tally.weights_by_rank(
                block.weights, block.start, block.first, block.last, offsets, plan.group, self.weights, self.weighted
            )
        reuse.stack_distances(*where, prompts, plan.group, self.lru, self.belady, self.lru_layers, self.belady_layers)
        if plan.usable.any():
            self.added += compare.profiles(
                *where, plan.splits, plan.usable, plan.slot, self._compared, self.directions,
                self.later_directions, self.placed, self.half_placed, self.pooled, self.alike, self.layers_alike,
                self.directed, plan.unit, self.kept,
            )  # fmt: skip
        if plan.with_pairs:
            forecast.learn_pairs(*where, self.pairs, self.own, self.following)
        self._keep(block)

    def _keep(self, block: Block) -> None:
        """Copy the rows of this block that batches are drawn from."""
        file, sampled = self.plan.file, self.plan.sampled
        stop = block.start + len(block.ids)
        for i in range(*np.searchsorted(sampled, (block.first, block.last))):
            begin = int(file.sequence_offsets[sampled[i]] + file.prompt_len[sampled[i]])
            low, high = max(begin, block.start), min(begin + int(self.sample_rows[i]), stop)
            if low < high:
                self.sample[i, low - begin : high - begin] = block.ids[low - block.start : high - block.start]


class Second:
    """Every sequence beside the sums over all."""

    def __init__(self, plan: Plan, first: First) -> None:
        file, groups, zeros = plan.file, plan.groups, plan.zeros
        layers, experts = file.num_layers, file.num_experts
        self.plan, self.first = plan, first
        self.cosines, self.compared = zeros(groups, layers, 3, dtype=np.float64), zeros(groups, layers)
        self.overlap = zeros(groups, experts)
        self.hits = zeros(groups, 5, len(plan.capacities), dtype=np.float64)
        self.layer_hits, self.layer_compared = zeros(groups, layers, 5, dtype=np.float64), zeros(groups, layers)
        self.sequences = zeros(groups)
        self.chosen_cosines, self.choosing = zeros(groups, layers, dtype=np.float64), zeros(groups, layers)
        self.chosen_hits = zeros(groups, len(plan.capacities), dtype=np.float64)
        self.chosen_layer_hits = zeros(groups, layers, dtype=np.float64)
        windows = plan.drift_windows
        self.drift_cosines, self.drift_compared = zeros(groups, windows, dtype=np.float64), zeros(groups, windows)
        self.drift_hits, self.drift_picks = zeros(groups, windows), zeros(groups, windows)
        self.drift_sequences = zeros(windows)
        self.found, self.found_asked = zeros(groups, max(layers - 1, 0), 2), zeros(groups, max(layers - 1, 0))
        if plan.with_pairs:
            # A little is added, so that pairs that were never seen are not impossible.
            self._chances = first.pairs  # in place, as they are large
            self._chances += 0.1
            self._chances /= (first.own + 1.0)[..., None]
            self._popular = np.zeros(first.following.shape, bool)
            order = np.argsort(-first.following, axis=-1, kind="stable")[:, : file.top_k]
            np.put_along_axis(self._popular, order, True, axis=-1)
        self._counts, self._drifting = zeros(2, layers, experts), zeros(3, layers, experts)

    def add(self, block: Block) -> None:
        """Add the rows of a block."""
        from perfmodel.kernels import compare, forecast

        plan, first = self.plan, self.first
        where = (block.ids, block.start, block.first, block.last, plan.file.sequence_offsets)
        if first.added:
            compare.controls(
                *where, plan.splits, plan.group, plan.usable, plan.slot, self._counts,
                first.directions, first.later_directions, first.placed, first.pooled, first.alike, first.layers_alike,
                first.directed, first.half_placed, first.added, self.cosines, self.compared, self.overlap, self.hits,
                self.layer_hits, self.layer_compared, self.sequences, self.chosen_cosines, self.choosing,
                self.chosen_hits, self.chosen_layer_hits,
            )  # fmt: skip
        if plan.drift_windows:
            compare.drift(
                *where, plan.splits, plan.group, plan.comparable, plan.drift_rows, self._drifting,
                self.drift_cosines, self.drift_compared, self.drift_hits, self.drift_picks, self.drift_sequences,
            )  # fmt: skip
        if plan.with_pairs:
            forecast.foretell(*where, plan.group, self._chances, self._popular, self.found, self.found_asked)
