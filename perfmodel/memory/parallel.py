"""How weights and caches are divided among several GPUs."""

import itertools
from dataclasses import dataclass

from perfmodel.errors import PlacementError
from perfmodel.families import one_line

_MOST_RANKS = 65_536


@dataclass(frozen=True, slots=True)
class Parallel:
    """Degrees of parallelism. One stage of the pipeline has ``stage_ranks`` GPUs.

    expert : ranks among which the experts of a layer are divided.
    tensor : ranks among which the matrices of attention, dense networks, shared experts and both tables are divided.
    pipeline : stages among which the layers are divided.
    expert_tensor : ranks among which the matrices of one expert are divided; by default what is left of ``tensor``
        beyond ``expert``, so that experts are spread over every GPU.

    Where ``expert * expert_tensor`` is larger than ``tensor``, attention is replicated, and each replica has its share
    of the sequences (data-parallel attention).

    Raises
    ------
    PlacementError : a degree is no integer from 1 to 65536, or the experts are spread over fewer GPUs than the rest or
        over a number that is no multiple of it.
    """

    expert: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert_tensor: int | None = None

    def __post_init__(self) -> None:
        for name in ("expert", "tensor", "pipeline", "expert_tensor"):
            found: object = getattr(self, name)
            if found is None and name == "expert_tensor":
                found = max(1, self.tensor // self.expert)
                object.__setattr__(self, name, found)
            if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= _MOST_RANKS:
                raise PlacementError(
                    f"parallel: {name} is {one_line(found)}; allowed: an integer from 1 to {_MOST_RANKS}"
                )
        if self.stage_ranks % self.tensor:
            raise PlacementError(
                f"parallel: expert {self.expert} x expert_tensor {self.expert_tensor} is {self.stage_ranks}; "
                f"allowed: a multiple of tensor, {self.tensor}, so that experts are spread over every GPU"
            )

    @property
    def expert_parts(self) -> int:
        """Ranks among which the matrices of one expert are divided."""
        assert self.expert_tensor is not None
        return self.expert_tensor

    @property
    def stage_ranks(self) -> int:
        """GPUs of one pipeline stage."""
        return self.expert * self.expert_parts

    @property
    def replicas(self) -> int:
        """Replicas of attention in a stage, each with its share of the sequences."""
        return self.stage_ranks // self.tensor

    @property
    def ranks(self) -> int:
        """GPUs in all."""
        return self.stage_ranks * self.pipeline

    def stages(self, num_layers: int) -> tuple[range, ...]:
        """The layers of each pipeline stage.

        Contiguous and as many in each as possible; layers that are left over go one each to the stages before the last,
        from the back, for the last also holds the head (as vLLM does).

        Raises
        ------
        PlacementError : more stages than layers.
        """
        if self.pipeline > num_layers:
            raise PlacementError(
                f"parallel: pipeline is {self.pipeline}; allowed: at most the number of layers, {num_layers}"
            )
        each, left = divmod(num_layers, self.pipeline)
        sizes = [each + (self.pipeline - 1 - left <= stage < self.pipeline - 1) for stage in range(self.pipeline)]
        return tuple(range(stop - size, stop) for size, stop in zip(sizes, itertools.accumulate(sizes), strict=True))
