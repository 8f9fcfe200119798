"""``python -m course_lib.tour``, also under torchrun or srun."""

import sys

from course_lib.tour.job import main

if __name__ == "__main__":
    sys.exit(main())
