"""Write a timeline down task by task, and let the list scheduler say when everything runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from perfmodel.kernels.schedule import list_schedule


@dataclass
class Timeline:
    """Tasks in the order in which they claim their resources, which are named by texts.

    >>> line = Timeline()
    >>> copied = line.task("link", 3.0)
    >>> line.task("gpu", 1.0)
    1
    >>> line.task("gpu", 2.0, after=[copied])
    2
    >>> line.makespan
    5.0
    """

    resources: list[str] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)
    after: list[tuple[int, ...]] = field(default_factory=list)

    def task(self, resource: str, duration: float, after: Sequence[int] = ()) -> int:
        """Add a task that waits for earlier ones; its number."""
        number = len(self.durations)
        assert duration >= 0
        assert all(0 <= other < number for other in after)
        self.resources.append(resource)
        self.durations.append(duration)
        self.after.append(tuple(after))
        return number

    def schedule(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Start and finish of every task."""
        names = sorted(set(self.resources))
        return list_schedule(
            np.array([names.index(name) for name in self.resources], np.int64),
            np.array(self.durations, np.float64),
            np.cumsum([0, *map(len, self.after)], dtype=np.int64),
            np.array([other for some in self.after for other in some], np.int64),
            len(names),
        )

    @property
    def makespan(self) -> float:
        """When the last task finishes; 0 without any."""
        return float(self.schedule()[1].max(initial=0.0))
