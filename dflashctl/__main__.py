"""`python -m dflashctl` is `dflashctl`."""

from dflashctl.start import main

if __name__ == "__main__":
    main()
