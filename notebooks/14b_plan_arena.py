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
# *Untimed.* Choose the degrees of all axes for a toy model on a small cluster. The planner checks and predicts your plan.
# Then real ranks run it: losses and gradient norms must equal those of one process. Your score is compared with the best
# plan that a search finds. You need lessons 12 and 14.
#
# Copy this notebook with `course start 14b`. In `work/`, your plans are saved.
#
# ## The rules
# - **Plan.** You choose `tp`, `cp`, `pp`, `ep`, `zero`, `schedule`, `chunks`, `micro_batch` and `recompute`. The level
#   fixes the batch, and dp is the number of ranks divided by tp x cp x pp.
# - **Defaults.** All degrees are 1, `micro_batch` is 1, and `recompute` is `"none"`. `zero` is 1 if dp x cp > 1.
#   `schedule` is `"1f1b"`, or `"interleaved"` if `chunks` > 1.
# - **Refusals.** Recomputation is `"none"`, or `"full"` without a pipeline. ZeRO-2 and ZeRO-3 work only without a
#   pipeline, and ZeRO-3 only without experts.
# - **Numbers.** All numbers are float64, so a parameter takes 8 bytes, its gradient 8 and Adam's two moments 16.
# - **Memory.** The limit counts saved activations, and the state that a rank stores between steps. ZeRO-1 and ZeRO-2
#   store only a shard of the gradients there. The blocks that ZeRO-3 has gathered do not count. A meter checks the limit
#   while the ranks run, and a rank that exceeds it fails, as on a GPU.
# - **Experts.** Routing is not even, so the prediction doubles the activations of models with experts.
# - **Compute.** A rank computes 100 MFLOP/s: sleep pads each block and the LM head to this speed.
# - **Links.** They are emulated. A collective whose ranks are in different nodes takes all its steps on the network.
# - **Overlap.** Compute hides only the gradients of plain DP (`zero=0`) and the traffic of ZeRO-2 and ZeRO-3. All other
#   communication is exposed.
#
# Some axes combine others: `dp_cp` is dp and cp together, `edp` the ranks that store the same experts, and `tp_kv` the
# ranks that share a KV head.
#
# ## Stars
# The score is the simulated step. The measured step depends on how busy the machine is, so it is only shown beside it.
#
# | stars | your plan |
# |---|---|
# | 1 | fits, and runs with correct gradients |
# | 2 | is at least as fast as the middle one of all plans that the search found to fit |
# | 3 | reaches **par**, halfway between the middle plan and the best |
# | 4 | is as fast as the best plan of the search |
#
# The search tries the schedules 1F1B, ZB-H1 and interleaved with two chunks. With other schedules, such as ZB-V, you may
# beat it.

# %%
from course_lib.grading import plans

for level in plans.LEVELS:
    print(level)

# %% [markdown]
# ## A plan that does not fit
# Four replicas each store the whole training state. The first line of the result lists the parts of memory:

# %%
print(plans.play(1, zero=0))

# %% [markdown]
# ## A plan that is impossible
# Tensor parallelism over three ranks does not divide the four ranks of the level:

# %%
print(plans.play(1, tp=3))

# %% [markdown]
# ## A plan that runs
# Tensor parallelism on all four ranks fits. Compare the prediction with the measured bytes and memory, and find out what
# the step waits for:

# %%
example = plans.play(1, "example", tp=4)
print(example)
assert example.ok
example.picture()

# %% [markdown]
# ## Your plan
# Choose a level, change the plan and run the cell. The plan below is level 4 with tensor parallelism across both nodes.
# Which axis should cross the network instead?
#
# `plans.play(LEVEL, on_ranks=False, tp=8)` only predicts, which takes less than a second.

# %%
LEVEL = 4
NAME = "you"
attempt = plans.play(LEVEL, NAME, tp=8)
print(attempt)
picture = attempt.picture() if attempt.ran else None
picture

# %% [markdown]
# ## The leaderboard
# The table lists your plans for this level and the three bars:

# %%
print(plans.leaderboard(LEVEL))

# %% [markdown]
# ## Things to try
# - Level 1: which of the four parts of memory is the largest? Three techniques make it smaller. Which of them costs no
#   time here?
# - Level 2: there are more ranks than sequences. What else can you divide?
# - Level 3: the batch is one long sequence. Compare `cp=4` with `tp=4`, then combine them. Where does the gradient of
#   `dp_cp` hide?
# - Level 4: which axis sends least between the nodes? Does a shorter bubble outweigh the cost of a pipeline?
# - Level 5: experts multiply the parameters. Divide them by `ep`, and see which link carries their tokens.
# - Level 6: there are sixteen ranks. Which axes should stay inside a node, and when does recomputation pay?
#
# `plans.stars()` counts your stars by level. `plans.level(4).search()` returns the plans of the search that fit, the
# fastest first. Look at it only when you give up.
