"""The one error that means: the user's input is at fault, and here is what to do about it."""


class InputError(ValueError):
  """Bad input or a refused request. The command line prints it as one line and exits with code 2.

  The message says which tensor, field or flag, what was found, what was expected and what to do.
  """

  def __init__(self, message: str):
    # One printable line whatever it quotes: a name may hold line breaks or a terminal's control codes.
    super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(message.split())))
