"""Messages about import options, as Python writes these: ``prompt_len`` in place of ``--prompt-len``."""

import contextlib
import re
from collections.abc import Iterator

from perfmodel.errors import PerfModelError


@contextlib.contextmanager
def said_by_keyword() -> Iterator[None]:
    """Readers name options as the command line does; an error that leaves here names the keywords in their place."""
    try:
        yield
    except PerfModelError as error:
        from dataclasses import fields

        from perfmodel.routing.importers.base import ImportOptions, option_name  # imported late: it makes traces

        keywords = {option_name(one.name): one.name for one in fields(ImportOptions)}
        known = "|".join(map(re.escape, keywords))
        text = re.sub(rf"(?<![\w/-])({known})(?![\w-])", lambda found: keywords[found[1]], str(error))
        if text == str(error):
            raise
        raise type(error)(text) from error
