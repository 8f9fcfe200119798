"""The exercises of each lesson, as data: cases, hints, wrong answers and right ones."""
