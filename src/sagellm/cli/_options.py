"""How commands share options and report errors.

A command takes a group of options as one parameter; `command` turns it into the options of the group:

    @command
    def serve(model: ModelArgument = None, *, settings: Settings) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Self

import typer

from sagellm.cli import EXIT_EXPLAINED
from sagellm.core.errors import MissingExtraError, RequestError, SageError
from sagellm.core.extras import EXTRA_OF

ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Folder or hub name of the model; default: the demo model."),
]

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="MODEL", help="Folder or hub name of the model; default: the demo model."
    ),
]


class OptionGroup(ABC):
    """Several options that a command gets as one value."""

    @classmethod
    @abstractmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """The options, as typer reads them."""

    @classmethod
    @abstractmethod
    def take(cls, given: dict[str, Any]) -> Self:
        """Take this group's options out of `given` and make the value."""


def option(name: str, kind: Any, declared: Any) -> inspect.Parameter:
    """An optional keyword parameter whose typer declaration is `declared`."""
    annotation = Annotated[kind | None, declared]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


_DEBUG = option("debug", bool, typer.Option("--debug", help="Show the traceback of an error."))


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Spread the option groups among a command's parameters, add `--debug`, and explain its errors."""
    own = inspect.signature(function, eval_str=True).parameters
    groups = {name: p.annotation for name, p in own.items() if _is_group(p.annotation)}

    @functools.wraps(function)
    def run(**given: Any) -> None:
        with explained(debug=bool(given.pop("debug"))):
            _check_encodable(given.values())
            values = {name: kind.take(given) for name, kind in groups.items()}
            function(**given, **values)

    parameters = [p for name, p in own.items() if name not in groups]
    for kind in groups.values():
        parameters += kind.parameters()
    parameters.append(_DEBUG)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _check_encodable(values: Iterable[Any]) -> None:
    """Bytes of an argument that are no text reach Python as halves of surrogate pairs."""
    for value in values:
        for text in map(str, value if isinstance(value, list) else (value,)):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(f"the argument {text!a} is not UTF-8 text") from error


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, OptionGroup)


@contextmanager
def explained(*, debug: bool) -> Iterator[None]:
    """An error raised on purpose, or a missing optional package, is one line on stderr and exit status 2;
    with `debug`, a traceback.
    """
    try:
        with _extras_named():
            yield
    except SageError as error:
        if debug:
            raise
        print(f"sagellm: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(EXIT_EXPLAINED) from error


@contextmanager
def _extras_named() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF:
            raise
        raise MissingExtraError("this command", EXTRA_OF[package], package) from error
