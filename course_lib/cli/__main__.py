"""``python -m course_lib.cli``: the same as ``course``."""

import sys

from course_lib.cli import main

if __name__ == "__main__":
    sys.exit(main())
