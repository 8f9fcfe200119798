"""The graders of the exercises, found in exercises/graders under this fixed module name.

``judge/lesson_05.py`` has the exercises of lesson 05: references, expectations, mistakes.
``runner/lesson_05.py`` calls the answers in a rank, and is all that a rank imports of them.
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / "exercises" / "graders"
__path__ = [str(FOLDER)]
