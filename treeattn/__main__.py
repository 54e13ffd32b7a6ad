"""``python -m treeattn``: the same as the ``treeattn`` command."""

from treeattn.cli import main

if __name__ == "__main__":
    main()
