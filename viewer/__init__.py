"""The Panel app that shows a run: state, view model, panes, and their building blocks."""
