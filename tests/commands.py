"""Run commands in this process, and check that bad input is refused in one line."""

import contextlib
import io
import json
from typing import Any, NamedTuple

from perfmodel.cli import main


class Answer(NamedTuple):
    """Exit code, standard output and standard error of one command."""

    code: Any
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output as the one JSON document that it must be."""
        assert self.code == 0, self.err
        return json.loads(self.out)


def run(*arguments: object) -> Answer:
    """One command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: Any = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse leaves this way
            code = stop.code
    return Answer(code, out.getvalue(), err.getvalue())


def check_refusal(answer: Answer, *words: str) -> None:
    """Exit code 2, one line on standard error that holds the words, and nothing else."""
    assert answer.code == 2, answer
    assert answer.out == ""
    assert answer.err.endswith("\n")
    lines = answer.err.splitlines()  # breaks at every character that a terminal may take for a new line
    assert len(lines) == 1, answer.err
    assert len(lines[0].strip()) > len("perfmodel: error: ")
    assert "Traceback" not in answer.err
    for word in words:
        assert word in answer.err
