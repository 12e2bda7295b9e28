"""The one error that means: the user's input is at fault, and here is what to do about it."""


class InputError(ValueError):
  """Bad input or a refused request. The command line prints it as one line and exits with code 2.

  The message says which tensor, field or flag, what was found, what was expected and what to do.
  """
