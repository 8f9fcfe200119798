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
#     lesson: '14b'
# ---

# %% [markdown]
# # 14b The plan arena
#
# *Untimed.* Choose the degrees of all axes for a toy model on a small cluster. Your plan is checked, predicted by the
# planner, run on real ranks, where its losses and gradients must equal those of one process, and scored beside the
# best plan that a search finds. You need lessons 12 and 14.
#
# Copy this notebook with `course start 14b`: in `work/` your plans are remembered.
#
# ## The rules
# - A plan is what `course plan` takes: `tp`, `cp`, `pp`, `ep`, `zero`, `schedule`, `chunks`, `micro_batch` and `recompute`.
#   dp is what is left. The batch is fixed.
# - All numbers are float64, so a parameter takes 8 bytes, its gradient 8 and Adam's two moments 16.
# - The limit counts state (weights, gradients, moments) and saved activations. A meter watches it while the ranks run,
#   and a rank that exceeds it fails, as on a GPU. The blocks that ZeRO-3 has gathered do not count.
# - Compute is padded by sleep to the planner's FLOPs over 100 MFLOP/s, and the links are emulated. A collective whose
#   ranks are in different nodes takes all its steps on the network.
# - Only the gradients of plain DP, and what ZeRO-2 and ZeRO-3 send, hide behind compute.
#
# ## Stars
# One for a plan that fits and runs with right gradients, two for a step no longer than that of half of all plans that
# fit, three for **par** (half of the way from there to the best), four for the best. The score is the simulated step.
# The measured step depends on how busy the machine is, so it only stands beside.

# %%
from course_lib.grading import plans

for level in plans.LEVELS:
    print(level)

# %% [markdown]
# ## A plan that does not fit
# Four replicas, each with the whole optimizer:

# %%
print(plans.play(1, zero=0))

# %% [markdown]
# ## A plan that is impossible
# Eight heads cannot be divided by three ranks, and three does not divide four:

# %%
print(plans.play(1, tp=3))

# %% [markdown]
# ## A plan that runs
# Tensor parallelism on all four ranks fits. Compare the predicted bytes and memory with what the ranks counted, and
# look at what the step waits for:

# %%
example = plans.play(1, "example", tp=4)
print(example)
assert example.ok
example.picture()

# %% [markdown]
# ## Your plan
# Choose a level, change the plan, run. As it stands this is level 4 with tensor parallelism across both nodes. Which
# axis should leave the node instead?

# %%
LEVEL = 4
NAME = "you"
attempt = plans.play(LEVEL, NAME, tp=8)
print(attempt)
picture = attempt.picture() if attempt.ran else None
picture

# %% [markdown]
# ## The leaderboard
# Your plans of this level, and the three bars:

# %%
print(plans.leaderboard(LEVEL))

# %% [markdown]
# ## Things to try
# - Level 1: which of the four parts of memory is too large? Three techniques make it smaller. Which of them costs no
#   time here?
# - Level 2: more ranks than sequences. What else can be divided?
# - Level 3: the sequence is long and there is one of it. Compare `cp=4` with `tp=4`, then mix them.
# - Level 4: which axis sends least across the border? Does a shorter bubble pay for it?
# - Level 5: experts multiply the parameters. Divide them by `ep`, and watch which link carries their tokens.
# - Level 6: sixteen ranks, and routing that is not even: the run may need more memory than even routing says.
#
# `plans.stars()` counts your stars by level. `plans.level(4).search()` returns all plans of a level that fit, the best
# first: look only when you give up.
