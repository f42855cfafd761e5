"""From argv to frozen dataclasses, and from any wrong value to one line and exit status 2."""

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

import tyro

Flags = TypeVar("Flags")
# Of a flag that may be given several times, once per value; any other tuple is replaced by the values behind its flag.
Repeatable = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
USAGE_ERROR = 2
_NOT_OF_ITS_TYPE = {  # How tyro says so, and what we say.
    r"invalid literal for int\(\) with base 10: (.*)": "a whole number",
    r"could not convert string to float: (.*)": "a number",
    r"no type matching \{None\}\|INT could be instantiated from \[(.*)\]": "a whole number or None",
    r"no type matching \{None\}\|FLOAT could be instantiated from \[(.*)\]": "a number or None",
}


def refuse(reason: object) -> NoReturn:
    """End the job with one line on stderr and exit status 2."""
    if isinstance(reason, FileExistsError | NotADirectoryError) and reason.filename:
        reason = f"{str(reason.filename)!r} is no folder, or lies below a file; allowed: a folder"
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
            parsed = tyro.cli(
                flags,
                args=list(argv),
                default=default,
                prog=program,
                config=(tyro.conf.OmitArgPrefixes,),
            )
        _refuse_not_finite(parsed)
        return parsed
    except ValueError as error:
        refuse(error)
    except SystemExit as stopped:
        if stopped.code in (0, None):
            raise
    refuse(_reason(said.getvalue()))


def _refuse_not_finite(flags: Any) -> None:
    """NaN passes every "above 0", and no flag has a use for infinity."""
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        if dataclasses.is_dataclass(value):
            _refuse_not_finite(value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{field.name} is {value}; allowed: a finite number")


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
    for pattern, allowed in _NOT_OF_ITS_TYPE.items():
        if found := re.fullmatch(rf"Error parsing --(\S+): {pattern}\.?", reason):
            return f"{found[1].replace('-', '_')} is {found[2]}; allowed: {allowed}"
    return re.sub(r"^Error parsing \S+: (?=.*; allowed)", "", reason)


def dry_run(resolved: dict[str, Any]) -> NoReturn:
    """Print the resolved configuration as JSON and stop."""
    print(json.dumps(resolved, indent=1, default=_plain))
    sys.exit(0)


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)
