"""`python -m dflashctl` is `dflashctl`."""

from dflashctl.cli.main import main

if __name__ == "__main__":
    main()
