"""From argv to frozen dataclasses, and from any wrong value to one line and exit status 2."""

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

import tyro

Flags = TypeVar("Flags")
# Of a flag that may be given several times, once per value; any other tuple is replaced by the values behind its flag.
Repeatable = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
USAGE_ERROR = 2


def refuse(reason: object) -> NoReturn:
    """End the job with one line on stderr and exit status 2."""
    print(f"error: {' '.join(str(reason).split())}", file=sys.stderr)
    sys.exit(USAGE_ERROR)


@contextlib.contextmanager
def refusing(*errors: type[Exception]) -> Iterator[None]:
    """Turns ValueError (and ``errors``) raised inside into one line and exit status 2."""
    try:
        yield
    except (ValueError, *errors) as error:
        refuse(error)


def peek(argv: Sequence[str], *names: str) -> dict[str, str | None]:
    """The values of a few flags that decide the defaults of all others; None where they are not given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in names:
        parser.add_argument(f"--{name.replace('_', '-')}", f"--{name}", dest=name)
    with contextlib.suppress(argparse.ArgumentError):
        return vars(parser.parse_known_args(argv)[0])
    return dict.fromkeys(names)  # A flag without its value: the full parser will say so.


def parse(flags: type[Flags], argv: Sequence[str], default: Flags, program: str) -> Flags:
    """Parse ``argv`` over ``default``. ``--help`` prints every flag with unit, default and source, and exits 0."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                flags,
                args=list(argv),
                default=default,
                prog=program,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as stopped:
        if stopped.code in (0, None):
            raise
    refuse(_reason(said.getvalue()))


def _reason(boxed: str) -> str:
    """The first paragraph of tyro's error box, as one line; where no box can be drawn, a title comes before it."""
    lines = [re.sub(r"^[│╭╰]\s?|\s*[│╮╯]$", "", line).strip() for line in boxed.splitlines()]
    is_rule = [bool(re.fullmatch(r"─.*|-{3,}|", line)) for line in lines]
    paragraphs = [
        " ".join(line for _, line in group)
        for ruled, group in itertools.groupby(zip(is_rule, lines, strict=True), key=lambda item: item[0])
        if not ruled
    ]
    reason = next(iter(paragraphs if "╭" in boxed else paragraphs[1:]), "the command line is wrong")
    return re.sub(r"^Error parsing \S+: (?=.* is .*; allowed)", "", reason)


def dry_run(resolved: dict[str, Any]) -> NoReturn:
    """Print the resolved configuration as JSON and stop."""
    print(json.dumps(resolved, indent=1, default=_plain))
    sys.exit(0)


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)
