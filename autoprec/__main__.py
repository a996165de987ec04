"""`python -m autoprec`, the same as the console script."""

import sys

from autoprec.cli import main

if __name__ == "__main__":
    sys.exit(main())
