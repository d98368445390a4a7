"""The exceptions that the command line prints as one line, without a traceback."""


class InputError(ValueError):
    """Reports something the user gave that cannot be used: a path, a file, a flag.

    The message names the value, what was expected and what to do. The command line prints it as one
    line, without a traceback; every other exception is a bug and keeps its traceback.
    """


class LostProcess(RuntimeError):
    """Another process of the run has ended, or does not answer. The command line prints it as one
    line."""
