"""The main job, `course tour`: one small model on real text, trained serially and in parallel.

Every technique is launched on real ranks, held against the serial twin (losses) and against its
formulas: bytes on each axis, state and activations of the fullest rank. The exit code is 1 when a
loss or a byte is off, never because of timing. The same tour runs where a launcher has already
started the ranks: ``torchrun --nproc-per-node=4 -m course_lib.tour``; then rank 0 alone prints and
writes.

This file imports nothing: ranks import it to find their functions, and need no pictures.
"""
