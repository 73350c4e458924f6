"""``python -m vescale_fsdp.conversion`` is ``vescale-convert``."""

from vescale_fsdp.conversion.cli import main

if __name__ == "__main__":
    main()
