# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
#   course:
#     lesson: '08b'
# ---

# %% [markdown]
# # 08b The schedule arena
#
# *Untimed.* Write a pipeline schedule as rows. Every illegal move is named with its reason. A legal schedule is
# drawn, simulated, run on real ranks, where its gradients must equal those of one process, and scored: step, bubble
# and memory beside 1F1B, zero bubble and the bound that no order can beat. You need lessons 07 and 08.
#
# Copy this notebook with `course start 08b`: in `work/` your attempts are remembered.
#
# ## The rules
# - A line is a rank, a cell is stage, operation and micro-batch: `0F3`. Operations are F, and either B, or I and W, for each stage and
#   micro-batch once.
# - F needs F of the stage before; B and I need F of their stage and B or I of the next stage; W needs its I.
# - Times are not written: an action begins when its rank is free and its inputs have arrived. F, I and W cost 1
#   unless the level says otherwise, and B costs I + W.
# - In flight are micro-batches that have had their F and not yet their B or W. Each level has a limit for every rank.
#
# ## Stars
# One for a legal schedule with right gradients, two for a step no longer than 1F1B's with the same work, three for **par** (half of the
# way from 1F1B to the library's best), four for the library's best. Five for a shorter one: a level is *open* where the library has not
# reached the bound. Its best is found by a search, which proves nothing.

# %%
from course_lib.grading import arena
from course_lib.view import schedule_picture

for level in arena.LEVELS:
    print(level)

# %% [markdown]
# ## An illegal one first
# Cells that cannot be read come first, since nothing else can be judged while there are any:

# %%
print(
    arena.play(
        1,
        """
0F0 0F1 0X0 0F2 0B1 0F3 B2 0B3
1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
""",
    )
)

# %% [markdown]
# With cells that can be read, the moves are judged: here a backward before its forward, on both ranks. Repair it, and
# the next kind is reported.

# %%
print(
    arena.play(
        1,
        """
0B0 0F0 0F1 0B1 0F2 0B2 0F3 0B3
1B0 1F0 1F1 1B1 1F2 1B2 1F3 1B3
""",
    )
)

# %% [markdown]
# Each cell is legal, but no rank can continue. The chain of waiting ranks is closed:

# %%
print(
    arena.play(
        1,
        """
0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3
1F0 1F1 1B0 1B1 1F2 1B2 1F3 1B3
""",
    )
)

# %% [markdown]
# ## A legal one
# One micro-batch there and back, then the next. Two ranks run it; the waits show what to change.

# %%
naive = """
0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3
1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
"""
example = arena.play(1, naive, "example")
print(example)
assert example.ok
schedule_picture(example.simulation, title="Naive: one rank works, the other waits")

# %% [markdown]
# ## Your rows
# Choose a level, replace the rows, run. As it stands this is 1F1B in level 1, two stars: where could an I go before its W? With
# `unit=0.02` the ranks are paced, 20 ms for a cost of 1, and the measured step stands beside the simulated one.

# %%
LEVEL = 1
NAME = "you"
rows = """
0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
"""
attempt = arena.play(LEVEL, rows, NAME, unit=0.02)
print(attempt)
picture = None
if attempt.simulation:
    picture = schedule_picture(
        attempt.simulation, title=f"Level {LEVEL}: {attempt.simulation.makespan:g} long"
    )
picture

# %% [markdown]
# ## The leaderboard
# Your attempts by number, and in brackets the library's schedules with the same work, also those that the level does not allow.

# %%
print(arena.leaderboard(LEVEL))
arena.picture(LEVEL)

# %% [markdown]
# ## Help
# Rows to begin with, here for level 4. Rows may also be a list of lists, returned by your own function.

# %%
start = arena.begin_with(4)
print(start)

# %% [markdown]
# Rows of four ranks are long. Write F and I alone, in the order that you want, and let the library put Ws into the
# gaps (B counts as I). The order makes the difference:

# %%
filled = arena.split_backwards(4, start)
print(filled)
print()
print(arena.play(4, filled, "example"))

# %% [markdown]
# ## Things to try
# - Level 1: split one B after the other into I and W. Which of them shortens the step?
# - Level 2: 1F1B is legal there. Where can W go that B could not?
# - Level 3: a rule that knows only rank and micro-batch reaches four stars (exercise 08-4).
# - Level 4: the library needs 32, and 31 is possible. Which rank is full first, and what does it wait for?
# - Levels 5 and 7: with the V-shaped placement the last rank has two neighboring stages. Which of them should go
#   first?
# - Level 6: less memory than the V's best. Which rank is full, and when?
# - Level 8: which rank works all the time whatever you do? Give that rank no reason to wait.
# - Level 9: when a message takes time, how many more forwards does a rank need before its first I?
# - Level 10: there is no proof that less is impossible.
#
# `arena.stars()` counts your stars by level.
