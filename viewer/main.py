"""The page for `panel serve viewer --address 127.0.0.1 --args FOLDER`."""

import sys

from comgra_decl.viewer.page import create_page

create_page(sys.argv[1:]).servable(title="comgra_decl")
