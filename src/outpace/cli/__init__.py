"""The command line."""

import sys
import warnings
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from outpace import __version__
from outpace.cli.bench import bench
from outpace.cli.chat import chat
from outpace.cli.command import Command, Group
from outpace.cli.convert import convert
from outpace.cli.doctor import doctor
from outpace.cli.generate import generate
from outpace.cli.methods import methods
from outpace.cli.models import models_app
from outpace.cli.options import complain
from outpace.cli.paper import paper
from outpace.cli.serve import serve
from outpace.cli.tables import count_ngrams, rank_vocabulary, tokenize_corpus
from outpace.cli.train import train_app
from outpace.cli.tune import tune
from outpace.cli.verify import verify
from outpace.cli.warmup import warmup
from outpace.lib.errors import OutpaceError, PerformanceWarning
from outpace.lib.threads import choose_threads

EXTRAS = {
    "fastapi": "serve",
    "uvicorn": "serve",
    "structlog": "serve",
    "prometheus_client": "serve",
    "httpx": "bench",
    "tensorboard": "train",
    "yaml": "train",
    "matplotlib": "plots",
}

# Commands import their code when they run: --help must not wait for transformers.
app = typer.Typer(cls=Group, no_args_is_help=True, pretty_exceptions_enable=False)
for command in (
    generate,
    chat,
    serve,
    verify,
    bench,
    doctor,
    tune,
    methods,
    convert,
    rank_vocabulary,
    count_ngrams,
    tokenize_corpus,
    warmup,
    paper,
):
    app.command(cls=Command)(command)
app.add_typer(train_app, name="train")
app.add_typer(models_app, name="models")


def _version(is_asked: bool) -> None:
    if is_asked:
        print(f"outpace {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Language models generate faster, without changing a token of plain decoding's output."""


def _show_warnings_in_a_line() -> None:
    """Leave file and line of code out of the package's own warnings: the message names the remedy."""
    stock = warnings.showwarning

    def show(message: Any, category: type[Warning], *where: Any, **options: Any) -> None:
        if issubclass(category, PerformanceWarning):
            print(f"warning: {message}", file=sys.stderr)  # not with rich's console: a progress bar may be drawn now
        else:
            stock(message, category, *where, **options)

    warnings.showwarning = show


def _escape_what_cannot_be_written() -> None:
    """Print characters that standard output's encoding lacks, such as 世 in Latin-1, as escapes, like standard error:
    otherwise they would raise an error within the answer."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def main() -> None:
    """Entry point: errors made on purpose become one line and exit status 2."""
    _escape_what_cannot_be_written()
    choose_threads()
    if sys.argv[1:3] == ["bench", "paper"]:  # `outpace bench` has no subcommands, so this is a separate command
        del sys.argv[1]
    _show_warnings_in_a_line()
    try:
        app()
    except (OutpaceError, OSError) as error:  # such as a folder that cannot be written, or a full disk
        complain(error)
        sys.exit(2)
    except UnicodeDecodeError as error:
        complain(f"the input is not text in {error.encoding}: {error}")
        sys.exit(2)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        extra = EXTRAS.get(missing)
        if extra is None:
            raise
        complain(f"this command needs {missing}: pip install 'outpace[{extra}]'")
        sys.exit(2)
