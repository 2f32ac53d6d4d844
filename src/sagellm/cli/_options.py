"""How commands share options and report errors.

A command takes a group of options as one parameter; `command` turns it into the options of the group:

    @command
    def serve(*, model: Model, settings: Settings) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Self, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from sagellm.cli import EXIT_EXPLAINED
from sagellm.core.errors import MissingExtraError, RequestError, SageError
from sagellm.core.extras import EXTRA_OF

Function = TypeVar("Function", bound=Callable[..., Any])
_MODEL_HELP = "Folder or hub name of the model; default: the demo model."

ModelOption = Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", help=_MODEL_HELP)]


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


@dataclass(frozen=True, slots=True)
class Model(OptionGroup):
    """`-m MODEL`, as in every command, or MODEL alone, in commands that have no other argument."""

    name: str | None

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        argument = typer.Argument(metavar="MODEL", help="The same as -m MODEL.", show_default=False)
        declared = typer.Option("--model", "-m", metavar="MODEL", help=_MODEL_HELP)
        return [option("model_argument", str, argument), option("model", str, declared)]

    @classmethod
    def take(cls, given: dict[str, Any]) -> Self:
        alone, named = given.pop("model_argument"), given.pop("model")
        if alone is not None and named is not None and alone != named:
            raise RequestError(f"two models, {alone} and {named}: name one", "model")
        return cls(alone if named is None else named)


class Command(TyperCommand):
    """Shows its whole first sentence of help in lists, and offers the nearest options for an unknown one."""

    def get_short_help_str(self, limit: int = 0) -> str:
        return super().get_short_help_str(_NO_LIMIT)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "possibilities", None) is not None:
                known = [name for one in self.get_params(ctx) for name in one.opts if name.startswith("--")]
                error.possibilities = _nearest_options(error.option_name, known)  # type: ignore[attr-defined]
            raise


class Group(TyperGroup):
    """Commands; the whole first sentence of a group's help is shown in lists.

    An unknown name is answered with the nearest command, or with all of them.
    """

    def get_short_help_str(self, limit: int = 0) -> str:
        return super().get_short_help_str(_NO_LIMIT)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            message = getattr(error, "message", "")
            if message.startswith("No such command") and "Did you mean" not in message:
                error.message = f"{message} Known: {', '.join(self.list_commands(ctx))}."  # type: ignore[attr-defined]
            raise


class App(typer.Typer):
    """A group of commands, each a `Command`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=Group, no_args_is_help=True, rich_markup_mode=None, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Function], Function]:
        return super().command(name, **{"cls": Command, **settings})


_NO_LIMIT = 10_000


def _nearest_options(name: str, known: Sequence[str]) -> list[str]:
    """Those that begin so, or else the one that is most alike."""
    return [one for one in known if one.startswith(name)] or get_close_matches(name, known, n=1)


def completing(values: Iterable[str]) -> Callable[[str], list[str]]:
    """What the shell offers for the value of an option: those of `values` that begin as the typed text."""
    known = list(values)
    return lambda incomplete: [one for one in known if one.startswith(incomplete)]


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
