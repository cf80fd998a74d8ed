"""The one exception that means "the user can mend this"."""


class InputError(ValueError):
    """Bad input. The message is one line that names the file, key or layer and the remedy.

    The command line prints it and exits with status 2; nothing has been written by then.
    """
