"""`python -m sagellm` is the command `sagellm`."""

from sagellm.cli import main

if __name__ == "__main__":
    main()
