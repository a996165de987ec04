"""`python -m autoprec`, the same as the console script."""

import sys

if __name__ == "__main__":
    try:
        from autoprec.cli import main

        code = main()
    except KeyboardInterrupt:  # before main could say so itself
        code = 130
    sys.exit(code)
