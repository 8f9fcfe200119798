"""03-4: buckets leave from autograd's hooks, while backward goes on."""

from __future__ import annotations

from course_lib.grading.exercise import Wrong
from course_lib.grading.lessons.lesson_03 import overlap_answers as answers
from course_lib.grading.lessons.lesson_03 import towers
from course_lib.grading.ranked import RankCase, Ranked, Trial

TWO, FOUR, UNUSED, STEPS, ONE = range(5)
HANG = (
    "Rank 1 did not use the parameters of bucket 1, so no hook of it fired there: finish must send "
    "what is left"
)
TRIALS = (Trial(2, 1), Trial(4, 1), Trial(3, 1, HANG), Trial(2, 2), Trial(1, 1))
REFUSAL = "this is what you are asked to write"

OVERLAP = Ranked(
    id="03-4",
    title="buckets that leave while backward runs",
    names=("Overlapped",),
    hints=(
        "ready is called once for each parameter, in an order that may differ from rank to rank. "
        "What must it write down, and when may bucket k leave?",
        "Take the parameter out of what its bucket still misses. Then send buckets as long as the "
        "next one in order misses nothing: none, one or several. finish sends the rest in the "
        "same order, waits for all, puts the sums into p.grad and begins anew.",
        "ready: if self.accumulating: return; self.missing[self.bucket_of[p]].discard(p); while "
        "len(self.handles) < len(self.buckets) and not self.missing[len(self.handles)]: "
        "self.send_next(). finish: the same loop without the second condition; then for bucket, "
        "handle: zip(bucket, comm.unflatten(handle.wait(), bucket)); self.begin_step().",
    ),
    wrong=(
        Wrong(answers.DoesNothing, words="nothing arrived in p.grad"),
        Wrong(answers.NeverWaits, words="nothing arrived in p.grad"),
        Wrong(answers.Averages, words="your gradients are exactly 2 times too small"),
        Wrong(answers.Twice, words="your gradients are exactly 2 times too large"),
        Wrong(
            answers.AtFirstGradient, words="a bucket left before all of its gradients were complete"
        ),
        Wrong(answers.FiringOrder, words="different buckets were added together"),
        Wrong(answers.AnyFull, words="bucket 0 left in its stead"),
        Wrong(answers.ForgetsUnused, words="finish must send what is left"),
        Wrong(answers.CountsEachMicroBatch, words="only the first micro-batch was sent"),
        Wrong(answers.CompletesInside, words="counted as complete inside accumulate()"),
        Wrong(answers.AddsToOwn, words="which it has to replace"),
        Wrong(answers.NoReset, words="is all reset in finish?"),
        Wrong(answers.NeverEmpties, words="is all reset in finish?"),
        Wrong(answers.ResetsWhatHooksSent, words="also with those that no hook sent"),
        Wrong(answers.KeepsOldContent, words="with zeros for what this rank did not use"),
        Wrong(answers.EachMicroBatch, words="calls in steps of 2 micro-batches"),
        Wrong(answers.AllInFinish, words="0 of 3 buckets had left"),
        Wrong(answers.WaitsInHook, words="only finish may wait"),
        Wrong(answers.OneAtATime, words="those that waited for it may leave too"),
        Wrong(answers.OneByOne, words="made 6 calls for 3 buckets"),
        Wrong(answers.Gathers, words="an all-reduce sends 2(n-1)/n"),
        Wrong(answers.library, words=REFUSAL),
        Wrong(answers.Unwritten, words="Overlapped is not written yet"),
        Wrong(lambda buckets, axis: None, words="AttributeError"),
    ),
    right=(answers.Overlapped, answers.InRawTorch),
    stub=answers.Unwritten,
    trials=TRIALS,
    inputs=lambda trial, rank, seed: (towers.task(trial, rank, seed),),
    act=towers.act,
    looks=(
        RankCase("gradients", "two ranks", TWO, towers.gradients),
        RankCase("gradients", "hooks in another order on some ranks", FOUR, towers.gradients),
        RankCase("gradients", "a bucket that a rank did not use", UNUSED, towers.in_every_step),
        RankCase("gradients", "two micro-batches", STEPS, towers.gradients),
        RankCase("gradients", "one rank", ONE, towers.gradients),
        RankCase("weights", "after three steps", STEPS, towers.weights),
        RankCase("wire", "calls and bytes", FOUR, towers.calls),
        RankCase("wire", "once a step", STEPS, towers.once_a_step),
        RankCase("wire", "while backward goes on", TWO, towers.while_backward_runs),
        RankCase("wire", "several at once", FOUR, towers.none_waits_in_vain),
    ),
    refused=(
        "course_lib.dp:Overlapped._ready",
        "course_lib.dp:Overlapped.finish",
        "course_lib.dp:Bucketed.finish",
        "course_lib.dp:Naive.finish",
    ),
)
