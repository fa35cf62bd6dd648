"""How a command ends: errors as one clear text, and exit codes.

Exit codes: 0 done; 1 an error; 2 a mistake in the configuration or on the command line; 129, 130 and 143
stopped by SIGHUP, Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from headrace.base.errors import HeadraceError


@contextmanager
def told(debug: bool) -> Iterator[None]:
    """Print errors that say what to do, and the system's, as one text; others are ours and keep their traceback."""
    try:
        yield
    except HeadraceError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        from headrace.cli.config_file import ConfigError

        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
