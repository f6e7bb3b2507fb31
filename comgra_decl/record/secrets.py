"""Mask passwords and keys in the data saved with a run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from comgra_decl.spec import Spec

MASK = "(not saved)"
"""The replacement for a secret."""

# A bare `token` or `key` usually refers to a number of tokens or a column; see `_BARE`.
_NAME = re.compile(
    r"(?:^|[._-])(?:password|passwd|passphrase|secret|credentials?"
    r"|(?:api|access|auth|private|secret|bearer|hf|wandb|github)[_-]?(?:key|token)"
    r"|secret[_-]\w+)$",
    re.IGNORECASE,
)


# If its value is a long word with letters and digits, it is a secret all the same.
_BARE = re.compile(r"(?:^|[._-])(?:token|key)$", re.IGNORECASE)
_LONG = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w.+/=-]{16,}")

_URL = re.compile(r"https?://[^\s,'\"}]+")
_LOGIN = re.compile(r"//[^/]*@")


def is_secret(name: str, value: str = "") -> bool:
    """Return whether a setting with this name, such as "wandb.api_key", contains a secret.

    A bare "token" or "key" does if its value looks like one.
    """
    if _NAME.search(name) is not None:
        return True
    return _BARE.search(name) is not None and _LONG.fullmatch(value) is not None


def without_secrets(arguments: Iterable[str]) -> list[str]:
    """Return a command line in which the values of secret settings are masked.

    Addresses that receive findings are masked as in a stored spec.
    """
    masked: list[str] = []
    follows = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if "notify" in argument:
            argument = _URL.sub(lambda url: without_path(url[0]), argument)
            name = argument.partition("=")[0]
        secret = is_secret(name.lstrip("-+~"), value)
        value_of_option = follows and not argument.startswith("-")
        masked.append(
            MASK if value_of_option else f"{name}={MASK}" if secret and equals else argument
        )
        follows = secret and not equals and name.startswith("-")
    return masked


def without_login(url: str) -> str:
    """Return a URL without its user name and password."""
    return _LOGIN.sub("//", url)


def without_path(url: str) -> str:
    """Return a URL without login, path and query, any of which may contain a token."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return url if "${" in url else f"{parts.scheme}://{host}/{MASK}"


def stored_spec(spec: Spec) -> Spec:
    """Return a spec for storing, without secrets.

    Values from the environment are replaced by their expressions. URLs of sinks have no login, and
    those that receive findings have neither login, path nor query.
    """
    from comgra_decl.spec.expressions import unresolved

    content = unresolved(spec)
    for sink in content["sinks"]:
        options = sink.get("mlflow")
        if options is not None and options["uri"] is not None:
            options["uri"] = without_login(options["uri"])
    notify = content["on_finding"]["notify"]
    if notify is not None:
        for key in ("url", "slack"):
            if notify[key] is not None:
                notify[key] = without_path(notify[key])
        email = notify["email"]
        if email is not None and email["password"] is not None and "${" not in email["password"]:
            email["password"] = MASK
    return type(spec).model_validate(content)


def masked(value: Any, name: str = "") -> Any:
    """Return a configuration in which the strings of secret settings are masked."""
    if isinstance(value, Mapping):
        return {key: masked(entry, str(key)) for key, entry in value.items()}
    if isinstance(value, list):
        return [masked(entry, name) for entry in value]
    return MASK if isinstance(value, str) and value and is_secret(name, value) else value


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as plain JSON data, with passwords and keys masked."""
    found = masked(_plain(config))
    assert isinstance(found, dict)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value
