"""The error that means: the input is at fault, not the program."""


class UserError(ValueError):
    """Bad input: the message says what was given, what is allowed and what to do.

    The command line prints the message alone and exits with 2; every other ValueError keeps its traceback.
    """
