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
#     lesson: '16'
# ---

# %% [markdown]
# # 16 Interview day: a number, a drawing, an answer, a design
#
# *20 minutes to read and run.* "A model of 13 billion parameters trains on 16 GPUs with ZeRO-1. Weights and gradients are
# in bf16, and Adam has fp32 moments and master weights. How many bytes of states does each GPU store?" You have one
# minute and a pen. A candidate answers 58.5 GB. The right number is 61.75 GB, so the answer is only 5 % too small.
# This lesson shows what an interviewer learns from these 5 %, and how to answer the four kinds of questions that such an
# interview consists of. It needs no other lesson, but it rehearses all of them.
#
# Vote first: `"true"`, `"false"` or `"only if ..."`.
#
# 1. *An answer within a factor of two of the right one is good enough.*
# 2. *1F1B replaced GPipe because its bubble is smaller.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## Four kinds of questions
# Each kind tests something else, so each needs its own practice. The last column names the tool of the course.
#
# | kind | usual time | the interviewer wants to see | practice |
# |---|---|---|---|
# | a number | 1 to 3 minutes | a formula, units, a check of the size | `course quiz` |
# | a concept | 1 minute, then 5 with a drawing | one clear claim, its reason, its limit | [concept questions](../docs/questions.md) |
# | code | 30 minutes | a correct first version, and its tests | [katas](16b_katas.ipynb) |
# | a design | 20 to 40 minutes | assumptions, numbers, the limit that decides | `course interview` |
#
# One rule serves all four: **say your assumptions first**. The number format of the gradients decides between 16 and 18
# bytes per parameter, and a kernel that uses the causal mask halves the FLOPs of the scores. If you name the assumption, the interviewer can
# follow your number or change the assumption. If you do not name it, your number only looks wrong.
#
# ## A number: formula first, then digits
# Here is the question of the first paragraph, as `course quiz` asks it. Answer it on paper, and write down the formula
# before any digit.

# %%
from course_lib.interview import quiz

question = quiz.question("memory-zero-1", seed=3)
question

# %%
predicted_gb = None

# %% [markdown]
# The quiz knows the values that classic mistakes give, so it can say what went wrong from the number alone. A good
# interviewer does the same. The next cell marks three common answers, and yours:

# %%
for said in ("58.5 GB", "13 GB", "61.75", f"{predicted_gb} GB"):
    if said != "None GB":
        print(f"{said:8} {question.mark(said)}\n")
print(*question.steps, sep="\n")

# %% [markdown]
# The first answer uses the formula of ZeRO-1 and forgets the master weight. The second answer is right for ZeRO-3. The
# third one is not marked, because a number without a unit can mean anything. So answer a numeric question in four steps,
# and say each of them aloud:
#
# 1. **Repeat** the question with its units, and add your assumptions.
# 2. **Write the formula** with symbols: (2 + 2 + 12/n) P bytes, for P parameters on n GPUs.
# 3. **Insert the numbers**, and round to two digits: 4.75 bytes times 13 billion is about 62 GB.
# 4. **Check the size** against something that you know. Weights and gradients alone are 4 bytes times 13 billion, so the
#    answer must be more than 52 GB. That rules out the second answer at once.
#
# ## Is a factor of two good enough?
# Rounding to two digits is welcome, but a factor of two is not rounding. The next cell draws one question of each kind in
# the quiz. It counts how many of them have a classic mistake whose value is between half and twice the right answer. Two
# sorts of mistakes do not count: GB for GiB, and a factor of two without a known cause.

# %%
NOT_COUNTED = {"factor-2", "half", "gib-as-gb", "gb-as-gib"}


def close_mistakes(question):
    """The classic mistakes within a factor of two of the answer."""
    named = {name: value for name, value in question.mistakes.items() if name not in NOT_COUNTED}
    return [name for name, value in named.items() if 0.5 <= value / question.value <= 2]


drawn = [quiz.question(template.id, seed=3) for template in quiz.templates()]
close = [one for one in drawn if close_mistakes(one)]
print(
    f"{len(close)} of {len(drawn)} kinds of questions have a classic mistake that close, such as:\n"
)
for name in ("volume-dp", "memory-activations-tp", "bubble-interleaved"):
    one = quiz.question(name, seed=3)
    first = close_mistakes(one)[0]
    print(
        f"{name}: {one.mistakes[first] / one.value:.2f} of the answer. {quiz.texts()['mistakes'][first]}"
    )

# %% [markdown]
# **Claim 1: false.** In most kinds of questions a classic mistake changes the answer by a factor of two or less: a ring
# without its second pass, a forgotten tp=2, the wrong base of a bubble. Your number cannot show that you
# avoided it, so the formula must. An estimate is fine if you say what you rounded.
#
# ## A drawing: 1F1B by hand
# "Draw 1F1B for four stages and eight micro-batches." Use graph paper, and make a backward as long as two forwards.
# Then type what rank 1, the second one, does in order. `F0` is the forward of micro-batch 0, and `B0` its backward.

# %%
drawn_row = None  # "F0 F1 ..."

# %%
from course_lib.schedule import Costs, drawing, make, simulate

costs = Costs.make(f=1, b=2)
one_f_one_b = simulate(make("1f1b", 4, 8), costs)
print(drawing(one_f_one_b))
row = [f"{action.op}{action.mb}" for action in one_f_one_b.schedule.rows[1]]
print("\nrank 1:", *row)
print("yours equal:", None if drawn_row is None else drawn_row.split() == row)

# %% [markdown]
# Draw the staircase of the warm-up first: rank r starts with 4 - r forwards. Then every rank alternates one backward and
# one forward, and the end mirrors the beginning. Now compare it with GPipe:

# %%
for name in ("gpipe", "1f1b"):
    found = simulate(make(name, 4, 8), costs)
    print(
        f"{name:6} {found.makespan:g} time units, bubble {found.bubble_of_total:.1%} of the total and "
        f"{found.bubble_of_ideal:.1%} of the ideal time, at most {found.schedule.peak_in_flight()[0]} in flight"
    )
print("your votes:", vote_1, vote_2)

# %% [markdown]
# **Claim 2: false.** Both steps take equally long. 1F1B replaced GPipe because of memory: the first rank stores
# activations of 4 micro-batches instead of 8, and the number does not grow with the number of micro-batches. The same
# bubble has two percentages, so name the base with each percentage.
#
# ## A concept: 60 seconds, then five minutes
# A concept question has two lengths. In the first minute say what it is, why it works, what it costs, and when not to use
# it. Then stop, so that the interviewer can choose what to ask next. The course has model answers of both lengths. Say
# your own answer to this question before you read ours:

# %%
from textwrap import fill

from course_lib.interview.concepts import concept

one = concept("data-what-is")
print(one.title, "\n")
print(fill(one.short, 110))

# %% [markdown]
# For the longer version, take a pen. Draw first and explain what you have drawn, so that the interviewer can follow you
# on the board. Then put numbers on the drawing:

# %%
print(one.drawing, "\n")
for number, step in enumerate(one.whiteboard, 1):
    print(fill(f"{number}. {step}", 110))
print("\nOften heard:", fill(one.wrong, 110))

# %% [markdown]
# Every question of the list has such a wrong answer, with the reason why it is wrong. Learn these reasons too, because
# "Why not the other way?" is the most natural follow-up.
#
# ## Code: correct first, then fast
# You get a blank file and half an hour. Say what each rank stores before and after the call, and write this down as the
# docstring. Then write the simplest correct version. While you write, name four cases in which distributed code often
# breaks: a size that n does not divide, a group that is not the world, a handle that is never waited for, and a second
# call. One line tests the first of them:

# %%
import torch

x = torch.arange(4.0)
print("chunk:       ", [len(part) for part in x.chunk(3)])
print("tensor_split:", [len(part) for part in x.tensor_split(3)])

# %% [markdown]
# `chunk` returns only two parts, so a ring all-reduce over three ranks that relies on it fails. The six
# [katas](16b_katas.ipynb) are tasks of this kind, and their checks try all four cases.
#
# ## A design: find the limit that decides
# A design question gives you a model and a cluster and asks for a layout. Begin with the assumptions: sequence length,
# tokens per step, number formats, links, and the goal. Then go through memory, communication and bubble in this order,
# with one number for each. Here is a case of the course:

# %%
from course_lib.interview import design

design.case("dense-180b")

# %% [markdown]
# Take a minute and decide on tp, pp, dp and the stage of ZeRO. The course answers a proposal as an interviewer would:
# with the limits that it breaks, or with its smallest margin. Many candidates make this proposal:

# %%
often = design.answer("dense-180b", "tp=8 pp=4 dp=4 zero=2")
print(often)
print("\nNext question:", fill(often.follow_up.ask, 110))

# %% [markdown]
# Two limits are broken: exposed communication and the MFU. The next proposal differs in one digit. Then put your own in
# its place and run the cell again:

# %%
design.answer("dense-180b", "tp=8 pp=4 dp=4 zero=1")

# %% [markdown]
# ZeRO-2 saves memory that this plan does not need, and pays for it with communication in every micro-batch. Every design
# has a weakest point, and here the answer names it: the MFU. Name yours before the interviewer does, with its number, and
# say what you would change if it broke.
#
# ## When you do not know
# Say what you know, derive what you can, and mark where your knowledge ends. Here is
# a good answer: "I have not used DualPipe. It feeds micro-batches from both ends of the pipeline, so I expect each rank to
# store two stages." It separates the fact from the guess. Do not invent a number. If the interviewer corrects you, use the correction at once.
#
# ## One week left
# [Seven days to an interview](../docs/interview.md) is a route of at most ninety minutes per day. It ends with a mock
# interview and has two model answers to speak. Keep these pages and commands beside it:
#
# | page or command | use it for |
# |---|---|
# | [formulas](../docs/formulas.md) | every formula to know, with a number for one example |
# | [glossary](../docs/glossary.md) | the terms, in English and Chinese |
# | [common claims](../docs/claims.md), [lesson 15](15_true_or_false.ipynb) | what is often said, and which of it is true |
# | `course quiz --diagnose` | which lessons to read first |
# | `course score` | how far your predictions in all lessons were off, and in which direction |
# | `course review` | the cards that are due today; `course cards` exports them |
# | `course interview` | a timed mock interview with a score sheet |
#
# Whatever you practice, answer before you read. In the experiments of Roediger and Karpicke, students who recalled
# a text from memory knew more of it after a week than students who read it again.
#
# **Exit questions.** Answer aloud, then unfold.
#
# **1.** You say that DDP sends 14 GB per rank and step for 7 billion parameters with bf16 gradients. The interviewer asks
# you to check this. What did you forget?
#
# <details><summary>Answer</summary>
# The second pass of the ring. Reduce-scatter and all-gather each send (n-1)/n of 14 GB, so a rank of a large group sends
# almost 28 GB.
# </details>
#
# **2.** "The bubble is 37.5 %." Which question do you expect, with 4 stages and 8 micro-batches?
#
# <details><summary>Answer</summary>
# Of which base? It is 3/8 of the ideal time and 3/11 = 27 % of the total time.
# </details>
#
# **3.** What do you say before the first number of a design?
#
# <details><summary>Answer</summary>
# The assumptions: model, sequence length, tokens per step, number formats and optimizer, hardware and links, and the
# goal.
# </details>
#
# **4.** Your plan needs 75 of 80 GB. Is it good?
#
# <details><summary>Answer</summary>
# It has a margin of 6 %, which buffers of collectives, fragmentation and uneven stages can use up. Say so, and name the
# change that you would make, such as one more stage or recomputation.
# </details>
#
# **5.** Which four cases do you test before you call distributed code finished?
#
# <details><summary>Answer</summary>
# A size that n does not divide, a group that is not the world, every asynchronous call waited for, and a second call.
# </details>
#
# **Sources.**
# - [Roediger and Karpicke 2006](https://doi.org/10.1111/j.1467-9280.2006.01693.x), why answering beats reading again
# - [Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), the bytes per parameter
# - [Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), 1F1B and its bubble
