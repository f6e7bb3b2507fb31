"""Map the location of a pydantic error, through the models, to the keys of the YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from comgra_decl.spec.described import descriptions


@dataclass(frozen=True)
class Place:
    """A place in the spec.

    Attributes:
        annotation: the declared type; None if unknown.
        data: the user's value.
        path: the key path as the user wrote it: "nodes.attn.capture[0]".
        owner: the place that contains this key; None at the top.
        key: the last key.
        about: the documentation of the key.
        alternative: whether this is a member of a union.
    """

    annotation: Any
    data: Any
    path: str = ""
    owner: Place | None = None
    key: str = ""
    about: str = ""
    alternative: bool = False

    @property
    def choices(self) -> list[Any]:
        """All values that a Literal at this place allows."""
        if get_origin(self.annotation) is Literal:
            return list(get_args(self.annotation))
        members = [replace(self, annotation=member) for member in _members(self.annotation)]
        return [choice for member in members for choice in member.choices]

    @property
    def keys(self) -> list[str]:
        """The keys of the model at this place."""
        return [*_fields(self.annotation)]


def follow(model: type[BaseModel], location: tuple[int | str, ...], data: Any) -> Place:
    """Return the place of an error with the given `location`, found while validating `data`.

    The key path omits the parts of the location that the user did not write. These are the tag of a
    union's member, the marker of a mapping's key, and the list or mapping that a short form
    represents.
    """
    place = Place(model, data)
    for step in location:
        place = _below(place, step)
    return place


def _below(place: Place, step: int | str) -> Place:
    members = _members(place.annotation)
    if members:
        return replace(place, annotation=_named(members, step), alternative=True)
    if step == "[key]":
        return place
    name, field = _fields(place.annotation).get(str(step), ("", None))
    return replace(
        _key_below(place, step),
        annotation=_inner(place.annotation) if field is None else _plain(field.annotation),
        about=descriptions(place.annotation).get(name, "") if name else "",
    )


def _key_below(place: Place, step: int | str) -> Place:
    """Return the place below this one, with its keys but without its type."""
    stands_for_a_list = isinstance(step, int) and get_origin(place.annotation) is list
    if isinstance(place.data, Mapping) and not stands_for_a_list:
        path = f"{place.path}.{step}" if place.path else str(step)
        data = place.data.get(step)
    elif isinstance(place.data, (list, tuple)) and isinstance(step, int):
        path = f"{place.path}[{step}]"
        data = place.data[step] if step < len(place.data) else None
    else:
        return place  # the short form of a list or of a mapping
    return replace(place, data=data, path=path, owner=place, key=str(step))


def _fields(annotation: Any) -> dict[str, tuple[str, FieldInfo]]:
    """Return a model's fields and names by the key that a user writes; empty for other types."""
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return {}
    return {f.alias or name: (name, f) for name, f in annotation.model_fields.items()}


def _inner(annotation: Any) -> Any:
    """Return the type of a container's entries, None if unknown."""
    arguments = get_args(annotation)
    return _plain(arguments[-1]) if arguments else None


def _plain(annotation: Any) -> Any:
    """Strip validators and "or None", which error locations do not contain."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if _is_union(annotation):
        members = [a for a in get_args(annotation) if a is not NoneType]
        return _plain(members[0]) if len(members) == 1 else annotation
    return annotation


def _members(annotation: Any) -> list[Any]:
    """Return the members of a union other than None; empty if it is not a union."""
    if not _is_union(annotation):
        return []
    return [_plain(a) for a in get_args(annotation) if a is not NoneType]


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _named(members: list[Any], tag: int | str) -> Any:
    """Return the member of a union that pydantic refers to as `tag`."""
    for member in members:
        if tag == getattr(member, "__name__", None) or str(tag) in _discriminators(member):
            return member
        if get_origin(member) is Literal and str(tag).startswith("literal["):
            return member
    return None


def _discriminators(member: Any) -> list[str]:
    literals = [f for _, f in _fields(member).values() if get_origin(f.annotation) is Literal]
    return [str(value) for field in literals for value in get_args(field.annotation)]
