"""llama.cpp: the experts of some layers run on the CPU, those of the others on the GPU; with a cache in newer forks.

Source: ggml-org/llama.cpp, options ``--n-cpu-moe`` and ``--no-op-offload``; the expert cache is that of forks. Rules:

- The experts of the first ``n_cpu_moe`` MoE layers are in host memory and the CPU runs them; all other layers are on
  the GPU as a whole. By default as few layers are on the CPU as fit, counted in as many experts as the other policies
  hold in the same memory; with a cache, all of them.
- A prompt of at least ``threshold`` tokens is run on the GPU instead, after every expert that it uses has been copied.
  For dense layers that is 32 tokens; a MoE layer needs E / k times as many, until an expert gets as many on average.
  ``op_offload=off`` leaves every prompt to the CPU. ``overlap`` computes an expert while the next ones are copied, as
  against copying the layer first.
- ``cache`` keeps some experts of the CPU layers on the GPU. A pick that misses runs on the CPU, and with ``lru`` and
  ``lfu`` its expert is then uploaded behind the layer. They start with what the prompt used most if that was copied,
  else empty. ``static`` holds the experts that the decode steps of the other sequences use most, and never changes.
- The host takes part in every layer that has work on the CPU; with a cache in every MoE layer, because only the router
  says which experts are there.
- ``trunk=cpu`` leaves everything beside the experts on the CPU, attention included. Then the layers and the cache on
  the GPU send activations there and back.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.bitwidth import LossTable
from perfmodel.caches import HIT_HIGH, CacheReplay, ExpertCache, replay_cache
from perfmodel.model import MoEModel
from perfmodel.policies.base import (
    EXPERTS,
    ClassTable,
    Executor,
    Plan,
    PlanInputs,
    Residency,
    RoundTrips,
    When,
    WorkClass,
    make_plan,
    option,
    require,
)
from perfmodel.policies.cached import extra_copies
from perfmodel.policies.costs import need_cpu
from perfmodel.policies.host import Prefill, by_falling_use, host_prefill
from perfmodel.policies.hosted import HostedExperts
from perfmodel.routing import statistics


class _Split(NamedTuple):
    """MoE layers whose experts are in host memory, and experts of each of them that are cached."""

    cpu_layers: int
    slots: int


@dataclass(frozen=True)
class LlamaCpp(HostedExperts):
    """Whole layers of experts on the CPU, with or without a cache of their experts on the GPU."""

    name: ClassVar[str] = "llama-cpp"
    summary: ClassVar[str] = "experts of the first layers on the CPU, with or without a GPU cache; long prompts copied"
    source: ClassVar[str] = "ggml-org/llama.cpp, --n-cpu-moe; cache as in forks of it"

    n_cpu_moe: int | None = option(
        None, "MoE layers whose experts are on the CPU, from the first; auto: fewest that fit, all with a cache", low=0
    )
    cache: Literal["none", "lru", "lfu", "static"] = option("none", "rule of the GPU cache for the CPU layers")
    slots: int | None = option(
        None, "with a cache: experts of each CPU layer that it holds; auto: as many as fit", low=0, high=EXPERTS
    )
    op_offload: Literal["on", "off"] = option("on", "whether long prompts run on the GPU after a copy")
    threshold: float | None = option(
        None, "with op_offload=on: fewest tokens of such a prompt; auto: 32 E / k", low=0, high=1e9
    )
    overlap: Literal["on", "off"] = option("on", "whether experts compute while others are copied")
    trunk: Literal["gpu", "cpu"] = option("gpu", "where everything beside the experts is")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "slots", self.slots is None or self.cache != "none", "auto with cache=none")

    @property
    def copies_experts(self) -> bool:
        return self.op_offload == "on"

    def _split(self, model: MoEModel, most: float) -> _Split:
        layers, experts = len(model.moe_layers), model.num_experts
        room = self._room(model, most)
        if self.n_cpu_moe is None:
            on_cpu = layers - room // experts if self.cache == "none" else layers
        else:
            require(self, "n_cpu_moe", self.n_cpu_moe <= layers, f"0 to {layers} for {model.name}")
            on_cpu = self.n_cpu_moe
        if self.cache == "none" or on_cpu == 0:
            return _Split(on_cpu, 0)
        if self.slots is None:
            return _Split(on_cpu, min(experts, max(0, room - experts * (layers - on_cpu)) // on_cpu))
        require(self, "slots", self.slots <= experts, f"0 to {experts} for {model.name}")
        return _Split(on_cpu, self.slots)

    def residency(self, model: MoEModel, most_gpu_experts: float, losses: LossTable | None = None) -> Residency:
        split = self._split(model, most_gpu_experts)
        resident = (len(model.moe_layers) - split.cpu_layers) * model.num_experts + split.cpu_layers * split.slots
        return self._keeps(model, resident)._replace(attention_on=self.trunk, trunk_on=self.trunk)

    def plan(self, inputs: PlanInputs) -> Plan:
        model, bits = inputs.model, self._bits(inputs.model)
        split = self._split(model, inputs.most_gpu_experts)
        if split.cpu_layers or self.trunk == "cpu":
            need_cpu(self, inputs.system)
        hot, notes = self._fixed(inputs, split)
        table = ClassTable()
        mode: Literal["threshold", "cpu"] = "threshold" if self.op_offload == "on" else "cpu"
        prefill = host_prefill(inputs, table, mode, bits=bits, hot=hot, threshold=self.threshold)
        picks, copies = self.pick_classes(inputs, hot, table), None
        if self.cache in ("lru", "lfu") and split.cpu_layers:
            found = self._replay(inputs, split, prefill, table)
            picks, copies = self._cached(found, picks, split, bits, table)
            notes = (*notes, f"{100 * found.hit_rate:.1f} % of the picks of the CPU layers hit the cache")
        kept: dict[str, Any] = self.residency(model, inputs.most_gpu_experts)._asdict()
        held = f"with {split.slots} experts of each cached by {self.cache}" if self.cache != "none" else "without cache"
        return make_plan(
            self,
            inputs,
            table,
            picks,
            prefill,
            overlap="max",
            copies=copies,
            fetch="pipelined" if self.overlap == "on" else "before",
            round_trips=self._round_trips(split, len(model.moe_layers)),
            pinned_experts=self._copied(model, split),
            **kept,
            notes=(
                f"{split.cpu_layers} of {len(model.moe_layers)} MoE layers have their experts on the CPU, {held};"
                f" everything beside the experts is on the {self.trunk.upper()}",
                *notes,
            ),
        )

    def _fixed(self, inputs: PlanInputs, split: _Split) -> tuple[NDArray[np.bool_], tuple[str, ...]]:
        """Experts that are on the GPU all the time [S, L, E]."""
        model, trace = inputs.model, inputs.replay.trace
        hot = np.zeros((trace.num_sequences, len(model.moe_layers), model.num_experts), np.bool_)
        hot[:, split.cpu_layers :] = True
        if self.cache != "static" or split.slots == 0:
            return hot, ()
        use = self.use_of_others(inputs)
        hot[:, : split.cpu_layers] = statistics.top_experts(use.counts[:, : split.cpu_layers], split.slots)
        return hot, use.notes

    def _round_trips(self, split: _Split, layers: int) -> RoundTrips:
        if self.trunk == "cpu":
            return "layer" if split.slots or split.cpu_layers < layers else "none"
        return "cpu" if self.cache == "none" else "layer"

    def _copied(self, model: MoEModel, split: _Split) -> float:
        """Experts a layer that may be copied, and so have to be pinned in host memory."""
        fixed = split.slots if self.cache == "static" else 0
        return split.cpu_layers * (model.num_experts - fixed) / len(model.moe_layers)

    def _replay(self, inputs: PlanInputs, split: _Split, prefill: Prefill, table: ClassTable) -> CacheReplay:
        """What the cache of the CPU layers holds."""
        rule: Literal["lru", "lfu"] = "lru" if self.cache == "lru" else "lfu"
        initial = None
        if prefill.classes is not None and prefill.tokens is not None:
            fetch = [number for number, work in enumerate(table.classes()) if work.executor == Executor.FETCH]
            used = np.where(np.isin(prefill.classes, fetch), prefill.tokens, 0)[:, : split.cpu_layers]
            initial = by_falling_use(used)
        return replay_cache(
            np.ascontiguousarray(inputs.replay.decode_ids[:, : split.cpu_layers]),
            inputs.replay.decode_offsets,
            inputs.model.num_experts,
            ExpertCache(split.slots, rule),
            initial=initial,
            batch=inputs.replay.batch.tokens,
        )

    def _cached(
        self, found: CacheReplay, picks: NDArray[np.uint8], split: _Split, bits: float, table: ClassTable
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
        """Classes of all picks where those of the CPU layers hit, and uploads of what missed."""
        hits = found.outcome == HIT_HIGH
        if hits.any():
            picks[:, : split.cpu_layers][hits] = table.number(WorkClass(Executor.GPU, bits))
        uploaded = np.zeros(picks.shape[:2], np.int64)
        uploaded[:, : split.cpu_layers] = (found.kept & ~hits).sum(axis=2)
        return picks, extra_copies([(uploaded, WorkClass(Executor.COPY, bits, when=When.BEHIND))], table, bits)
