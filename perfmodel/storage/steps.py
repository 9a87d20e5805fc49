"""A bound on how long a regular expression from a config may take."""

import math
import re

_LONGEST_NAME = 100  # characters of the names that are matched, or so
_MOST_DIGITS = 8  # that stand side by side in them
_QUANTIFIER = re.compile(r"[*+?]|\{\d*,?\d*\}")
_GROUP = re.compile(r"\((?:\?(?::|=|!|<=|<!|P<\w+>))?")


def most_steps(expression: str) -> float | None:
    """Upper bound on the ways in which a backtracking matcher can try an expression on the name of a module.

    Alternatives multiply, an option doubles, and n repetitions of single characters can end at ``100^n / n!`` places of
    a name. None where there is no useful bound: repeated groups, references to groups, flags.
    """
    steps, repeats = 1.0, 0
    alternatives = [1]
    at, before = 0, ""
    while at < len(expression):
        sign = expression[at]
        quantifier = _QUANTIFIER.match(expression, at)
        if quantifier is not None:
            if sign == "?":
                steps *= 2
            elif before == ")":
                return None
            elif before == r"\d":
                steps *= _MOST_DIGITS
            else:
                repeats += 1
            at = quantifier.end()
            at += expression[at : at + 1] in ("?", "+")  # lazy or possessive, which repeats nothing
            before = ""
            continue
        before = sign
        at += 1
        if sign == "\\":
            before = expression[at - 1 : at + 1]
            if before[1:].isdigit():
                return None
            at += 1
        elif sign == "[":
            at = _end_of_set(expression, at)
        elif sign == "(":
            group = _GROUP.match(expression, at - 1)
            if group is None or expression.startswith("?", group.end()):
                return None
            at = group.end()
            alternatives.append(1)
        elif sign == "|":
            alternatives[-1] += 1
        elif sign == ")" and len(alternatives) > 1:
            steps *= alternatives.pop()
        if steps > 1e30 or repeats > 10:
            return None
    return steps * math.prod(alternatives) * float(_LONGEST_NAME**repeats) / math.factorial(repeats)


def _end_of_set(expression: str, at: int) -> int:
    """The position after a set of characters whose bracket stands before ``at``."""
    at += expression.startswith("^", at)
    at += expression.startswith("]", at)
    while at < len(expression) and expression[at] != "]":
        at += 2 if expression[at] == "\\" else 1
    return at + 1
