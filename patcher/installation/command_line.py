"""A server's command line with some of its flags set, changed or taken off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

DEFAULT_PORT = 30000


def apply_flags(argv: Sequence[str], flags: Mapping[str, str | bool]) -> list[str]:
    """`argv` with each flag given its value: a string is its value, True a bare flag, False takes it off.

    A flag that is there, as `--flag value` or `--flag=value`, is replaced where it first stands and removed elsewhere
    (with every word up to the next `--`, since a flag may have several values); others are appended.
    """
    result: list[str] = []
    placed: set[str] = set()
    words = list(argv)
    i = 0
    while i < len(words):
        flag, equals, _ = words[i].partition("=")
        if flag not in flags:
            result.append(words[i])
            i += 1
            continue
        if flag not in placed:
            result += _words(flag, flags[flag])
            placed.add(flag)
        i += 1
        while not equals and i < len(words) and not words[i].startswith("--"):
            i += 1
    for flag, value in flags.items():
        if flag not in placed:
            result += _words(flag, value)
    return result


def different_flags(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """The flags that two command lines do not both have with the same values."""
    flags, others = _flags_of(one), _flags_of(other)
    return [flag for flag in {**flags, **others} if flags.get(flag) != others.get(flag)]


def port_of(argv: Sequence[str]) -> int:
    """The port that a server's command line names; SGLang's own default where it names none."""
    return _number(argv, "--port", DEFAULT_PORT)


def rank_of(argv: Sequence[str]) -> int:
    """The node rank that a server's command line names; 0 where it names none."""
    return _number(argv, "--node-rank", 0)


def _number(argv: Sequence[str], wanted: str, default: int) -> int:
    number = default
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        value = value if equals else following
        if flag == wanted and value.isdigit():
            number = int(value)
    return number


def _flags_of(argv: Sequence[str]) -> dict[str, list[str]]:
    """Each flag with the words up to the next one; `--flag=value` is `--flag value`."""
    flags: dict[str, list[str]] = {}
    words: list[str] = []
    for word in argv:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            words = flags.setdefault(flag, [])
            words += [value] if equals else []
        else:
            words.append(word)
    return flags


def _words(flag: str, value: str | bool) -> list[str]:
    if value is False:
        return []
    return [flag] if value is True else [flag, value]
