"""Mask passwords and keys in the data saved with a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from comgra_decl.spec import Spec

MASK = "(not saved)"
"""The replacement for a secret."""

# A bare `token` or `key` usually refers to a number of tokens or a column.
_NAME = re.compile(
    r"(?:^|[._-])(?:password|passwd|passphrase|secret|credentials?"
    r"|(?:api|access|auth|private|secret|bearer|hf|wandb|github)[_-]?(?:key|token)"
    r"|secret[_-]\w+)$",
    re.IGNORECASE,
)


_LOGIN = re.compile(r"//[^/]*@")


def is_secret(name: str) -> bool:
    """Return whether a setting with this name, such as "wandb.api_key", contains a secret."""
    return _NAME.search(name) is not None


def without_secrets(arguments: Iterable[str]) -> list[str]:
    """Return a command line in which the values of secret settings are masked."""
    masked: list[str] = []
    follows = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        secret = is_secret(name.lstrip("-+~"))
        value_of_option = follows and not argument.startswith("-")
        masked.append(
            MASK if value_of_option else f"{name}={MASK}" if secret and equals else argument
        )
        follows = secret and not equals and name.startswith("-")
    return masked


def without_login(url: str) -> str:
    """Return a URL without its user name and password."""
    return _LOGIN.sub("//", url)


def without_logins(spec: Spec) -> Spec:
    """Return a spec for storing: the URLs of its sinks contain no passwords."""
    sinks = []
    for sink in spec.sinks:
        options = sink.mlflow
        if options is not None and options.uri is not None:
            options = options.model_copy(update={"uri": without_login(options.uri)})
        sinks.append(sink.model_copy(update={"mlflow": options}))
    return spec.model_copy(update={"sinks": sinks})


def masked(value: Any, name: str = "") -> Any:
    """Return a configuration in which the strings of secret settings are masked."""
    if isinstance(value, Mapping):
        return {key: masked(entry, str(key)) for key, entry in value.items()}
    if isinstance(value, list):
        return [masked(entry, name) for entry in value]
    return MASK if isinstance(value, str) and value and is_secret(name) else value
