"""`python -m comgra_decl train.py`: runs a training script and records it."""

from comgra_decl.doors.script import main

if __name__ == "__main__":
    main()
