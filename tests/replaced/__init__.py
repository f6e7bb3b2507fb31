"""What comgra can do is here, and what fails there does not fail here.

The ids in the names of the tests are those of a survey of comgra 0.11.5: R is a feature of its
recorder, L a limit or trap, F a failure.
"""
