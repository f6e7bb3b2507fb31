"""What commands have in common that try something with a script: their options, their end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from comgra_decl.launch.noting import CODES, Meaning, note_verdict, run_named
from comgra_decl.launch.script import Call, UsageError
from comgra_decl.launch.watched import called, number_of, options_of, refuse

if TYPE_CHECKING:
    from comgra_decl.query import Run


class NumberOption(NamedTuple):
    """The option with a whole number that an experiment has beside `--json` and `--for`."""

    name: str
    default: int
    least: int = 1


@dataclass(frozen=True)
class Experiment:
    """An experiment with a script, as the command line asks for it.

    Attributes:
        command: its name on the command line.
        arguments: what follows that.
        number: the value of its option.
        call: the script.
        run: beside which the verdict is noted; None: beside none.
        as_json: whether the verdict is printed for other programs.
    """

    command: str
    arguments: tuple[str, ...]
    number: int
    call: Call
    run: Run | None
    as_json: bool

    def conclude(
        self, meaning: Meaning, reason: str, *, content: dict[str, Any], show: Callable[[], None]
    ) -> NoReturn:
        """Prints the verdict, notes it beside the run, and ends with its exit code.

        Args:
            meaning: what the verdict says of the script.
            reason: in a sentence.
            content: the verdict as JSON can hold it.
            show: prints it for people.
        """
        if self.as_json:
            sys.stdout.write(json.dumps(content, indent=2) + "\n")
        else:
            show()
        name = self.command.replace("-", "_")
        note_verdict(self.run, name, meaning, reason=reason, arguments=self.arguments)
        sys.exit(CODES[meaning])


def experiment(
    command: str, arguments: Sequence[str], *, usage: str, option: NumberOption
) -> Experiment | None:
    """Returns what a command line asks for; None where it asks for help, which is then printed.

    Ends the program where it makes no sense.
    """
    rest = [*arguments]
    if rest and rest[0] in ("-h", "--help"):
        sys.stdout.write(usage)
        return None
    try:
        options = options_of(rest, flags=("--json",), values=("--for", option.name))
        number = number_of(option.name, options, option.default, option.least)
        run, call = run_named(options), called(rest)
    except UsageError as error:
        refuse(command, error, usage)
    return Experiment(command, tuple(arguments), number, call, run, "--json" in options)
