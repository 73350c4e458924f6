"""``python -m vescale_fsdp.conversion`` is ``vescale-convert``."""

import sys


def main() -> None:
    """Entry point. Ctrl-C ends the command without a traceback, also while it is still being imported."""
    try:
        from vescale_fsdp.conversion.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
