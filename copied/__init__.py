"""What is written for a copy of a script, beside the files that it needs: `make copy` asks for it.

    readme.py               README.md: how to run it, what to change first, what each file is
    tests.py                tests/test_<script>.py, from test_script.template: does it still learn?
    convergence.py          what the trial of a script reaches: that test's numbers
    Makefile, pytest.ini    for `make test` there

Only the standard library is needed.
"""
