"""`python -m postroom` is `postroom`."""

from postroom.cli import main

if __name__ == "__main__":
    main()
