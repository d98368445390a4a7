"""The one exception that is the user's to fix."""


class InputError(ValueError):
    """Reports something the user gave that cannot be used: a path, a file, a flag.

    The message names the value, what was expected and what to do. The command line prints it as one
    line, without a traceback; every other exception is a bug and keeps its traceback.
    """
