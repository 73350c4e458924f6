"""``python -m vescale_fsdp.conversion`` is ``vescale-convert``."""

import sys


def main() -> None:
    """Entry point. Ctrl-C while the command is still being imported ends without a traceback, as later."""
    try:
        from vescale_fsdp.conversion.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
