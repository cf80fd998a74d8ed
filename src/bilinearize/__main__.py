"""`python -m bilinearize`: the same as the console script."""

from bilinearize.cli import main

if __name__ == "__main__":
    main()
