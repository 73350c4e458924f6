"""Run ``vescale-convert`` as ``python -m vescale_fsdp.conversion``, for example under torchrun."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback, even while its modules are being imported."""
    try:  # inside the function, so that Ctrl-C during the import is caught too
        from vescale_fsdp.conversion.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)  # the shells' exit status for SIGINT: 128 + 2
    run()


if __name__ == "__main__":
    main()
