"""Hints for keywords that other libraries have for the same thing."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def hinted(**elsewhere: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have a function that is called with one of these keywords raise a :class:`TypeError` that says what to give.

    Args:
        elsewhere: by keyword, what is expected in its place.
    """

    def wrap(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            refuse(function.__name__, kwargs, elsewhere)
            return function(*args, **kwargs)

        return checked

    return wrap


def refuse(name: str, given: dict[str, object], elsewhere: dict[str, str]) -> None:
    """Raise :class:`TypeError` if one of these keywords is given."""
    for keyword in elsewhere.keys() & given.keys():
        raise TypeError(f"{name}() got {keyword}=..., which it does not have; expected {elsewhere[keyword]}")
