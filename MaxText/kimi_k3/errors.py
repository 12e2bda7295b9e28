"""The errors that the command line tells apart: the user's input is at fault, or another process has gone."""


class InputError(ValueError):
  """Bad input or a refused request. The command line prints it as one line and exits with code 2.

  The message says which tensor, field or flag, what was found, what was expected and what to do.
  """

  def __init__(self, message: str):
    # One printable line whatever it quotes: a name may hold line breaks or a terminal's control codes.
    super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(message.split())))


LOST_PROCESS_CODE = 75  # EX_TEMPFAIL of sysexits.h: the same command may well succeed


class LostProcess(OSError):
  """Another process of the run has ended, so this one cannot go on. The command line exits with LOST_PROCESS_CODE."""
