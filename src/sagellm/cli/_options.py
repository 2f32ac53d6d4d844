"""How commands declare and share options, and report errors.

An option is the default of a parameter. A command takes a group of options as one parameter, and `command`
turns it into the options of the group:

    @dataclass(frozen=True, slots=True)
    class Sizes(OptionGroup):
        rows: int = flag("--rows N", "Rows; default: 3.", 3)

    @command
    def show(out: Path = flag("--out -o FILE", "Where to.", ...), *, sizes: Sizes) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Annotated, Any, Self, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from sagellm.cli import EXIT_EXPLAINED
from sagellm.core.errors import MissingExtraError, RequestError, SageError
from sagellm.core.extras import EXTRA_OF


def flag(names: str, text: str, default: Any = None, **settings: Any) -> Any:
    """An option: names and metavar (`--out -o FILE`), help and default.

    Without names it is called as its parameter or field. The default `...` makes it required. The result is a
    dataclass's field, so that groups declare their options as commands do.
    """
    parts = names.split()
    flags = [part for part in parts if part.startswith("-")]
    metavar = parts[-1] if len(parts) > len(flags) else None
    declared = typer.Option(*flags, metavar=metavar, help=text, **settings)
    return field(default=default, metadata={"typer": declared})


def argument(metavar: str, text: str, default: Any = None, **settings: Any) -> Any:
    """A positional argument; otherwise as `flag`."""
    declared = typer.Argument(metavar=metavar, help=text, **settings)
    return field(default=default, metadata={"typer": declared})


MODEL = flag("--model -m MODEL", "Folder or hub name of the model; default: the demo model.")


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Several options that a command gets as one value; its fields declare them.

    An option that is not given has the default of its field. An option whose field has a type `tuple[X, ...]`
    may be repeated. A group whose options are not its fields overrides both class methods.
    """

    @classmethod
    def options(cls) -> list[inspect.Parameter]:
        """The options, as typer reads them."""
        kinds, made = get_type_hints(cls), []
        for declared in fields(cls):
            kind = kinds[declared.name]
            if get_origin(kind) is tuple:
                kind = list[get_args(kind)[0]]  # type: ignore[misc] # known only now
            made.append(option(declared.name, kind, declared))
        return made

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        """The group of the options that were given, by name; repeated ones are lists."""
        return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})

    def given(self) -> dict[str, Any]:
        """The fields that have a value: neither None nor empty."""
        return with_value(**{each.name: getattr(self, each.name) for each in fields(self)})


def with_value(**values: Any) -> dict[str, Any]:
    """Those of `values` that are neither None nor empty."""
    return {name: value for name, value in values.items() if value not in (None, ())}


def option(name: str, kind: Any, declared: Any, default: Any = None) -> inspect.Parameter:
    """A parameter as typer reads it; `declared` comes from `flag` or `argument`."""
    kind = kind | None if default is None else kind
    annotation = Annotated[kind, declared.metadata["typer"]]
    given = inspect.Parameter.empty if default is ... else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=given, annotation=annotation)


@dataclass(frozen=True, slots=True)
class Model(OptionGroup):
    """`-m MODEL` or MODEL alone, in commands that have no other argument."""

    name: str | None

    @classmethod
    def options(cls) -> list[inspect.Parameter]:
        alone = argument("MODEL", "The same as -m MODEL.", show_default=False)
        return [option("model_argument", str, alone), option("model", str, MODEL)]

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        if len(set(given.values())) > 1:
            alone, named = given["model_argument"], given["model"]
            raise RequestError(f"two models, {alone} and {named}: name one", "model")
        return cls(next(iter(given.values()), None))


class Command(TyperCommand):
    """A command that offers the nearest options for an unknown one."""

    def get_short_help_str(self, limit: int = 0) -> str:
        return super().get_short_help_str(10_000)  # lists show the whole first sentence

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "possibilities", None) is not None:
                name = error.option_name  # type: ignore[attr-defined]
                known = [opt for param in self.get_params(ctx) for opt in param.opts if opt.startswith("--")]
                completed = [opt for opt in known if opt.startswith(name)]
                error.possibilities = completed or get_close_matches(name, known, n=1)  # type: ignore[attr-defined]
            raise


class CommandGroup(TyperGroup):
    """A group that offers the nearest command for an unknown one, or lists all."""

    def get_short_help_str(self, limit: int = 0) -> str:
        return super().get_short_help_str(10_000)  # as in `Command`

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
        super().__init__(cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None, **settings)

    def add(self, *functions: Callable[..., None]) -> None:
        """Add commands that are named as their functions."""
        for function in functions:
            self.command(function.__name__, cls=Command)(function)


def completing(values: Iterable[str]) -> Callable[[str], list[str]]:
    """The shell's completion of a value: those of `values` that begin with the text."""
    known = list(values)
    return lambda incomplete: [value for value in known if value.startswith(incomplete)]


_DEBUG = option("debug", bool, flag("--debug", "Show the traceback of an error."))


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose option groups are spread into options, with `--debug` and explained errors."""
    groups, options, parameters = {}, {}, []
    for name, own in inspect.signature(function, eval_str=True).parameters.items():
        if isinstance(own.annotation, type) and issubclass(own.annotation, OptionGroup):
            groups[name], options[name] = own.annotation, own.annotation.options()
        else:
            parameters.append(option(name, own.annotation, own.default, own.default.default))
    parameters += [*itertools.chain(*options.values()), _DEBUG]

    @functools.wraps(function)
    def run(**given: Any) -> None:
        with explained(debug=bool(given.pop("debug"))):
            _check_encodable(given.values())
            for name, kind in groups.items():
                values = {option.name: given.pop(option.name) for option in options[name]}
                given[name] = kind.of({k: v for k, v in values.items() if v not in (None, [])})
            function(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _check_encodable(values: Iterable[Any]) -> None:
    """Refuse arguments that are not UTF-8, which Python reads as halves of surrogate pairs."""
    for value in values:
        for text in map(str, value if isinstance(value, list) else (value,)):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(f"the argument {text!a} is not UTF-8 text") from error


@contextmanager
def explained(*, debug: bool) -> Iterator[None]:
    """Print an expected error as one line on stderr and exit with status 2.

    Expected are `SageError`s and missing optional packages. With `debug` they are tracebacks.
    """
    try:
        try:
            yield
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in EXTRA_OF:
                raise
            raise MissingExtraError("this command", EXTRA_OF[package], package) from error
    except SageError as error:
        if debug:
            raise
        print(f"sagellm: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(EXIT_EXPLAINED) from error
