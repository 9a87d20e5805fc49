"""What an evaluation says: one policy on one system, for one recorded trace."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

#: Parts of a token's critical path; they add up to the time per output token.
PARTS = ("attention", "router", "dense", "experts_gpu", "link", "ndp", "head", "overhead")


class HitRates(NamedTuple):
    """Share of decode picks that find their expert on the GPU, beside its controls; every sequence counts alike.

    own : the policy's placement. uniform : K / E. other_sequence : placed by another sequence's prefill.
    static : placed by the decode profile of the other sequences. oracle : placed by the sequence's own decode.
    None where the trace cannot tell.
    """

    own: float
    uniform: float
    other_sequence: float | None
    static: float | None
    oracle: float


@dataclass(frozen=True)
class Evaluation:
    """What one policy costs on one system. Times in seconds, sizes in bytes; None where the trace has no prefill.

    ttft_s : prefill, mean over sequences. migration_s : one-off copies after it. end_to_end_s : everything.
    tpot_*_s : time per output token over all decode steps. ndp_side_s : busy time of the near-data device a
    token. breakdown_s : the mean token by what is on the critical path. busy_s : the same work whether hidden or
    not. bytes_per_token : by tier. memory_bytes : by device and use. bandwidth_floor_s : the busiest tier at its
    datasheet rate. binding_resource : the largest share of the critical path. weakest_source : the weakest kind
    of evidence among the hardware constants.
    """

    policy: str
    model: str
    system: str
    trace: str
    trace_source: str
    prompt_tokens: float
    output_tokens: float
    ttft_s: float | None
    migration_s: float
    end_to_end_s: float | None
    decode_s: float
    tpot_mean_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    tpot_p99_s: float
    tpot_max_s: float
    decode_tok_per_s: float
    ndp_side_s: float
    breakdown_s: dict[str, float]
    busy_s: dict[str, float]
    bytes_per_token: dict[str, float]
    memory_bytes: dict[str, dict[str, float]]
    bandwidth_floor_s: float
    binding_resource: str
    hit_rate: HitRates | None
    prefill_decode_cosine: tuple[float, ...] | None
    weakest_source: str
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain Python values, ready for JSON."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["hit_rate"] = None if self.hit_rate is None else self.hit_rate._asdict()
        values["notes"] = list(self.notes)
        if self.prefill_decode_cosine is not None:
            # A layer without a single assigned pick has no cosine.
            values["prefill_decode_cosine"] = [None if np.isnan(c) else c for c in self.prefill_decode_cosine]
        return values
