"""The `preble` command: `main` knows the sub-commands, each is a file or folder here, `console` is what they share."""

from .main import COMMANDS as COMMANDS
from .main import build_parser as build_parser
from .main import main as main
