"""The main job, `course tour`: a small model on real text, trained by one process and in parallel.

Every technique runs on real ranks. Its losses are compared with the single-process reference, its
bytes per axis with a formula and the kernel's count, and the state and activations of the fullest
rank with formulas. The exit code is 1 when a
loss or a byte is off, never because of timing. The same tour runs where a launcher has already
started the ranks: ``torchrun --nproc-per-node=4 -m course_lib.tour``; then rank 0 alone prints and
writes.

This file imports nothing: ranks import it to find their functions, and need no pictures.
"""
