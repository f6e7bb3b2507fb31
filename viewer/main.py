"""The page for `panel serve viewer --address 127.0.0.1 --args FOLDER`."""

import sys

import panel as pn

from comgra_decl.viewer.gate import names_of
from comgra_decl.viewer.page import create_page

# Panel owns this server, so it can refuse only the page, not the connection, to an unrecognized
# host name.
_names, _host = names_of(sys.orig_argv), str((pn.state.headers or {}).get("Host", ""))
if _names.know(_host):
    create_page(sys.argv[1:]).servable(title="comgra_decl")
else:
    pn.pane.Str(_names.refusal(_host)).servable(title="comgra_decl")  # type: ignore[no-untyped-call]
