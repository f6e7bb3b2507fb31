"""The Panel app that displays a run: state, view model, panes, and their building blocks."""

from comgra_decl.errors import needed

needed("panel", "view")  # so that the error names the extra, whichever part is imported
