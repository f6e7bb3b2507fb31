"""comgra_decl can do what comgra can, and what fails in comgra does not fail here.

The ids in the test names come from a survey of comgra 0.11.5: R is a feature of its recorder, L a
limit or pitfall, F a failure.
"""
