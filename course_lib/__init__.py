"""A course on parallel training, and the small library it is built with.

Import the parts by name: ``from course_lib import comm``, ``from course_lib.launch import run``.
This file imports nothing, so that ``course --help`` answers at once.
"""

__version__ = "0.1.0"
