"""Which communicators a bench compares, with which options."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from communicators.bench_results import REFERENCE
from communicators.byte_sizes import parse_bytes
from communicators.candidate import Candidate
from communicators.errors import UnavailableError
from communicators.registry import available_communicators, options_of

#: It sends nothing: its times would be a lie in a comparison.
NOT_COMPARED = ("dummy",)


def parse_candidate(text: str) -> Candidate:
    """Read ``"multi_ring"`` or ``"multi_ring:dims=2x2,n_chunks=8"``.

    Raises:
        ValueError: malformed.
    """
    name, colon, rest = text.partition(":")
    return Candidate.of(name, **parse_options(rest.split(",") if colon else []))


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Read options ``"key=value"``.

    ``dims`` are factors such as ``2x2``, keys that end in ``_bytes`` numbers of bytes
    such as ``1MiB``; other values are Python's literals (``8``, ``None``), else text.

    Raises:
        ValueError: malformed, or twice the same key.
    """
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key.isidentifier() or not value:
            raise ValueError(f"option {text!r}: expected KEY=VALUE")
        if key in options:
            raise ValueError(f"option {key!r} is given twice")
        options[key] = _parse_value(key, value)
    if "allreduce_grad_dtype" in options:
        raise ValueError(
            "option 'allreduce_grad_dtype': give --allreduce-grad-dtype, which is for "
            "all communicators"
        )
    return options


def _parse_value(key: str, text: str) -> Any:
    if key == "dims" and re.fullmatch(r"\d+(x\d+)*", text):
        return tuple(int(factor) for factor in text.split("x"))
    if key.endswith("_bytes"):
        return parse_bytes(text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def choose_candidates(
    chosen: Sequence[str], options: Sequence[str] = ()
) -> list[Candidate]:
    """Return what to compare, the bare MPI library first.

    Args:
        chosen: as :func:`parse_candidate` reads them; without any, all that this
            machine has, but ``dummy``.
        options: ``"key=value"`` for each of the communicators that has the option.

    Raises:
        ValueError: an unknown communicator, or ``dummy``; a malformed option, or one
            that none of the communicators has.
        UnavailableError: a communicator cannot be imported.
    """
    shared = parse_options(options)
    if chosen:
        candidates = [parse_candidate(text) for text in chosen]
    else:
        names = available_communicators()
        candidates = [Candidate(name) for name in names if name not in NOT_COMPARED]
    for candidate in candidates:
        if candidate.name in NOT_COMPARED:
            raise ValueError(
                f"communicator {candidate.name!r} sends nothing; its times would say "
                "nothing of the others, and its results are wrong"
            )
    candidates = [c for c in candidates if c.name != REFERENCE]
    known = {c.name: _options(c.name) for c in candidates}
    for candidate in candidates:
        for key, _ in candidate.options:
            if key not in known[candidate.name]:
                raise ValueError(
                    f"communicator {candidate.name!r} has no option {key!r}; its "
                    f"options: {', '.join(known[candidate.name])}"
                )
    for key in shared:
        if not any(key in accepted for accepted in known.values()):
            raise ValueError(
                f"none of the communicators {', '.join(known)} has an option {key!r}"
            )
    merged = [
        Candidate.of(
            c.name,
            **{k: shared[k] for k in shared if k in known[c.name]} | dict(c.options),
        )
        for c in candidates
    ]
    return [
        Candidate(REFERENCE),
        *(c for i, c in enumerate(merged) if c not in merged[:i]),
    ]


def _options(name: str) -> list[str]:
    try:
        return options_of(name)
    except UnavailableError:
        # The bench says so in its table. What it takes cannot be known.
        return []
