"""Small training runs with one known bug each, and healthy ones, to test the diagnosis.

The forms `tune` and `second` may be inspected while rules are written and tuned. The `report` form
has different architectures, data and seeds, and measures how good the rules are.
"""
