"""What the panes show, as plain dataclasses computed from a run; no Panel, no browser."""
