"""All private parts of Panel and Bokeh that the viewer uses, with fallbacks in case they change.

Panel and Bokeh have no public hooks for the following: sending a component's parameters directly,
receiving a component's messages, changing a model before it is sent, rendering the login form, and
checking every request to a server. If a part that only improves speed or appearance has changed,
the viewer falls back to Panel's own behaviour. If a part that is essential or protects the viewer
has changed, importing this module raises an error with the reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import panel as pn
from bokeh.server.server import Server
from panel.auth import BasicAuthProvider, BasicLoginHandler
from panel.custom import JSComponent
from tornado.httputil import HTTPServerConnectionDelegate

SEEN = {"panel": "1.8.10 to 1.9.4", "bokeh": "3.9.0 to 3.9.2"}
"""Versions whose private parts match those below. The first and the last version are tested."""

PRIVATE = {
    "JSComponent._update_properties": "(self, *events, doc)",
    "JSComponent._process_param_change": "(self, params)",
    "JSComponent._update_model": "(self, events, msg, root, model, doc, comm)",
    "JSComponent._set_on_model": "(self, msg, root, model)",
    "JSComponent._get_model": "(self, doc, root, parent, comm)",
    "JSComponent._handle_msg": "(self, data)",
    "JSComponent._send_msg": "(self, data)",
    "Column._preprocess": "(self, root, changed, old_models)",
    "BasicLoginHandler._validate": "(self, username, password)",
}
"""Methods of Panel that are overridden or called, with their parameters."""

PRIVATE_ATTRIBUTES = {
    "_in_process__events": "components: read if present",
    "_loaded": "`pn.extension` and `hv.extension`: read if present",
    "_preprocessing_hooks": "`Viewable`: extended if present",
    "_login_template": "`BasicLoginHandler` and `BasicAuthProvider`: required",
    "_http": "Bokeh's server: required",
    "_tornado": "Bokeh's server: required",
}
"""Attributes of Panel's and Bokeh's objects that are read, with their owners."""

_OWNERS = {
    "JSComponent": JSComponent,
    "Column": pn.Column,
    "BasicLoginHandler": BasicLoginHandler,
}


def unchanged(name: str) -> bool:
    """Return whether a method has the parameters listed in `PRIVATE`."""
    owner, _, method = name.partition(".")
    found: Callable[..., Any] | None = getattr(_OWNERS[owner], method, None)
    if found is None:
        return False
    parameters = inspect.signature(found).parameters.values()
    names = ["*" * (p.kind is p.VAR_POSITIONAL) + p.name for p in parameters]
    return f"({', '.join(names)})" == PRIVATE[name]


_SENDS_DIRECTLY = all(
    unchanged(f"JSComponent.{method}")
    for method in ("_update_properties", "_process_param_change", "_update_model", "_set_on_model")
)
_PREPROCESSES = unchanged("Column._preprocess")
_TELLS_OF_DISPLAYS = unchanged("JSComponent._get_model")

_NEEDED = ("JSComponent._handle_msg", "JSComponent._send_msg", "BasicLoginHandler._validate")

for _name in _NEEDED:
    if not unchanged(_name):
        raise ImportError(
            f"panel {pn.__version__} has no {_name}{PRIVATE[_name]}, which the viewer requires; "
            f"it works with panel {SEEN['panel']}."
        )


class MessagingComponent(JSComponent):
    """A browser component that sends its parameters directly and receives messages.

    Subclasses define `on_browser_message`.
    """

    __abstract = True

    def __init__(self, **params: Any) -> None:
        self._own = frozenset(type(self).param) - frozenset(JSComponent.param)
        super().__init__(**params)  # type: ignore[no-untyped-call]  # panel is not annotated

    def on_browser_message(self, data: Any) -> None:
        """Handle a message from the browser, which is untrusted."""
        raise NotImplementedError

    def before_display(self) -> None:
        """Prepare the parameters for another browser; called before each display."""

    def send_to_browser(self, message: dict[str, Any]) -> None:
        """Send a message to the component's JavaScript."""
        self._send_msg(message)

    def _handle_msg(self, data: Any) -> None:
        self.on_browser_message(data)

    def _get_model(self, *args: Any, **kwargs: Any) -> Any:
        if _TELLS_OF_DISPLAYS:
            self.before_display()
        return super()._get_model(*args, **kwargs)

    def _update_properties(self, *events: Any, doc: Any) -> dict[str, Any]:
        """Skips the design's styles if only the component's own parameters have changed."""
        if _SENDS_DIRECTLY and all(event.name in self._own for event in events):
            changes = {event.name: event.new for event in events}
            return dict(self._process_param_change(changes))  # type: ignore[no-untyped-call]
        return dict(super()._update_properties(*events, doc=doc))

    def _update_model(
        self, events: Any, msg: dict[str, Any], root: Any, model: Any, doc: Any, comm: Any
    ) -> None:
        """Write the component's own parameters directly to the data of the browser's model.

        Panel would first query the model itself for each parameter, which raises and catches an
        error. This takes 0.1 ms per parameter and happens several times per change.
        """
        # changes just received from the browser, by document, which must not be sent back
        received = getattr(self, "_in_process__events", None)
        elsewhere = not _SENDS_DIRECTLY or received is None or comm or received.get(doc)
        if elsewhere or not self._own.issuperset(msg):
            super()._update_model(events, msg, root, model, doc, comm)
        else:
            with pn.io.hold(doc):
                self._set_on_model(msg, root, model.data)


class PreparedColumn(pn.Column):
    """A column whose models can be changed before they are sent or saved.

    Subclasses define `prepare`, which is not called if Panel has changed its private hook.
    """

    def prepare(self, root: Any) -> None:
        """Change the Bokeh models of the column and of everything below it."""
        raise NotImplementedError

    def _preprocess(self, root: Any, *args: Any, **kwargs: Any) -> None:
        super()._preprocess(root, *args, **kwargs)
        if _PREPROCESSES:
            self.prepare(root)


def prepare_everything(prepare: Callable[[Any, Any], None]) -> None:
    """Has `prepare(viewable, root)` change all models before Panel displays them."""
    hooks = getattr(pn.viewable.Viewable, "_preprocessing_hooks", None)
    if isinstance(hooks, list) and prepare not in hooks:
        hooks.append(prepare)


class LoginHandler(BasicLoginHandler):
    """A login form whose password check subclasses implement."""

    def log_in(self) -> None:
        """Log in the user whose name was sent. The caller must have checked the password."""
        super().post()  # type: ignore[no-untyped-call]

    def show_form(self, message: str) -> None:
        """Send the form again, with a message."""
        self.write(self._login_template.render(errormessage=message))

    def _validate(self, _username: str, _password: str) -> bool:
        return True  # `log_in` is called only with a correct password


class LoginProvider(BasicAuthProvider):
    """Lets a Panel login handler have additional attributes."""

    def handler(self, kind: type[LoginHandler], **attributes: Any) -> type[LoginHandler]:
        """Return a subclass of `kind` with the provider's template and the given attributes."""
        return type(kind.__name__, (kind,), {"_login_template": self._login_template, **attributes})


def guard(
    server: Server,
    make_gate: Callable[[HTTPServerConnectionDelegate], HTTPServerConnectionDelegate],
) -> None:
    """Pass every request to a server through a gate, before any of its routes.

    Args:
        server: A server that has not started yet.
        make_gate: Receives the server's current request handler and returns its replacement.
    """
    server._http.request_callback = make_gate(server._tornado)  # noqa: SLF001 - see module docstring


def extension_is_loaded(extension: Any = pn.extension) -> bool:
    """Return whether `pn.extension` or `hv.extension` has run; True if this is not revealed."""
    return bool(getattr(extension, "_loaded", True))
