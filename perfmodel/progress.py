"""How far a long task is: a bar on a terminal, and nothing where nobody watches."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from perfmodel.errors import PerfModelError

#: Called with what is done and all that is to be done, in points, experts or whatever is counted.
Report = Callable[[int, int], None]


def is_report(given: object) -> bool:
    """Whether this is a function; a type can be called too, and is none."""
    return callable(given) and not isinstance(given, type)


def check_report(name: str, given: object) -> None:
    """Refuse what is neither None nor a function to report to.

    Raises PerfModelError.
    """
    if given is not None and not is_report(given):
        raise PerfModelError(f"{name}: found a value of type {type(given).__name__}, allowed None or a function")


def watched() -> bool:
    """Whether standard error is a terminal."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # none, or closed
        return False


def tell(text: str) -> None:
    """A remark about what the sweep waits for, on standard error."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # none, gone, or closed
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


@contextlib.contextmanager
def bar(label: str, unit: str = "points") -> Iterator[Report]:
    """A bar on standard error with the points done (or what else is counted), their rate and the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{short(speed)} {unit}/s")

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}% of {task.fields[size]} " + unit),
        Rate(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=console.is_terminal) as progress:
        task: list[TaskID] = []

        def report(done: int, total: int) -> None:
            if not task:  # points that were done before are not part of the rate
                task.append(progress.add_task(label, total=total, completed=done, size=short(total)))
            progress.update(task[0], completed=done)

        yield report


def short(number: float) -> str:
    """A count in three digits with a prefix: ``"1.25 M"``."""
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {prefix}"
    return f"{number:.3g}"
