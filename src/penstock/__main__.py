"""Run the command line: `python -m penstock`."""

from penstock.cli.main import main

if __name__ == "__main__":
    main()
