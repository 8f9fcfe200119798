"""Five questions that the literature leaves open, answered by simulation and formula.

``python -m course_lib.bench.questions`` prints the numbers of docs/open-questions.md, and with
``--out docs`` draws its plots. No ranks are launched.
"""
