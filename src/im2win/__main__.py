"""`python -m im2win`: the command line."""

from im2win.cli.main import main

if __name__ == "__main__":
    main()
