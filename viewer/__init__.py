"""The Panel app that displays a run: state, view model, panes, and their building blocks."""
