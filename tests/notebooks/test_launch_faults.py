"""Every fault in a rank, in a real kernel: the right culprit, its line, and a usable notebook."""

from __future__ import annotations

import pytest


def lines_of_ranks(error: str) -> dict[int, str]:
    """The report's line on each rank."""
    lines = [line.removeprefix("RankError: ") for line in error.splitlines()]
    return {int(line.split()[1]): line for line in lines if line.startswith("rank ")}


def test_a_cell_function_uses_notebook_variables(notebook):
    notebook.cell("offset = torch.arange(3.0)\ndef helper(x): return x + offset")
    source = "def f(a):\n    x = helper(a)\n    dist.all_reduce(x)\n    return x\nrun(f, 1.0, n=2)"
    result = notebook.cell(source)
    assert result.error == ""
    assert result.value == "[tensor([2., 4., 6.]), tensor([2., 4., 6.])]"


def test_one_raises_while_the_others_wait(notebook):
    source = (
        "def f():\n"
        "    if dist.get_rank() == 2:\n"
        "        raise ValueError('seven is too many')\n"
        "    dist.all_reduce(torch.ones(3))\n"
        "run(f)"
    )
    cell = notebook.cell(source)
    assert cell.error_name == "RankError"
    first, second, *_ = cell.error.splitlines()
    assert first == "RankError: rank 2 raised ValueError: seven is too many"
    assert f"cell {cell.number} line 3, in f:  raise ValueError('seven is too many')" in second
    others = lines_of_ranks(cell.error)
    for rank in (0, 1, 3):
        place = f"rank {rank} was at: all_reduce, cell {cell.number} line 4"
        assert others[rank].startswith(place)
    assert cell.seconds < 4  # 2 s on an idle machine
    notebook.assert_usable()


def test_the_line_of_an_earlier_cell_is_named(notebook):
    defined = notebook.cell("def g(x):\n    return 1 / x")
    cell = notebook.cell("def f():\n    return g(dist.get_rank() - 1)\nrun(f, n=2)")
    assert "rank 1 raised ZeroDivisionError" in cell.error
    assert f"cell {cell.number} line 2, in f" in cell.error
    assert f"cell {defined.number} line 2, in g:  return 1 / x" in cell.error
    assert "ipykernel" not in cell.error
    notebook.assert_usable()


def test_a_deadline_names_the_line_of_every_rank(notebook):
    source = (
        "def f():\n"
        "    x = torch.ones(3)\n"
        "    if dist.get_rank() == 1:\n"
        "        time.sleep(60)\n"
        "    elif dist.get_rank() == 2:\n"
        "        dist.recv(x, src=1)\n"
        "    else:\n"
        "        dist.all_reduce(x)\n"
        "run(f, timeout=1)"
    )
    cell = notebook.cell(source)
    assert cell.error_name == "RankDeadline"
    assert "4 of 4 ranks had not returned after 1 s" in cell.error
    lines = lines_of_ranks(cell.error)
    places = {0: "all_reduce, {} line 8", 1: "{} line 4", 2: "recv, {} line 6"}
    for rank, place in {**places, 3: places[0]}.items():
        assert lines[rank].startswith(f"rank {rank} was at: " + place.format(f"cell {cell.number}"))
    notebook.assert_usable()


@pytest.mark.parametrize(
    ("act", "what"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by signal 9 (SIGKILL)"),
        ("os._exit(3)", "left the process with exit code 3"),
        ("import ctypes; ctypes.string_at(0)", "was ended by signal 11 (SIGSEGV)"),
        ("sys.exit('no more')", "called sys.exit"),
    ],
)
def test_one_leaves_while_the_others_wait(notebook, act, what):
    source = (
        "def f():\n"
        "    dist.barrier()  # or a rank may die while others still make their group\n"
        f"    if dist.get_rank() == 1:\n        {act}\n"
        "    dist.barrier()\n"
        "run(f)"
    )
    cell = notebook.cell(source)
    assert cell.error_name == "RankError"
    assert cell.error.startswith(f"RankError: rank 1 {what}")
    lines = lines_of_ranks(cell.error)
    for rank in (0, 2, 3):
        assert f"at: barrier, cell {cell.number} line 5" in lines[rank]
    assert cell.seconds < 4
    notebook.assert_usable()


def test_a_crash_names_the_line(notebook):
    cell = notebook.cell("def f():\n    import ctypes\n    ctypes.string_at(0)\nrun(f, n=1)")
    assert f"signal 11 (SIGSEGV), at: cell {cell.number} line 3" in cell.error
    notebook.assert_usable()


def test_unequal_sizes_in_which_gloo_aborts(notebook):
    source = (
        "def f():\n"
        "    x = torch.ones(1000 * (1 + dist.get_rank()))\n"
        "    dist.all_reduce(x)\n"
        "run(f, timeout=5)"
    )
    cell = notebook.cell(source)
    assert "was ended by signal 6 (SIGABRT)" in cell.error.splitlines()[0]
    assert f"all_reduce, cell {cell.number} line 3" in cell.error.splitlines()[0]
    assert "checked=True" in cell.error
    notebook.assert_usable()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("comm.all_reduce(torch.ones(3 + here), mesh.dp)", "all_reduce of float32 [4]"),
        ("comm.all_reduce(torch.ones(3).to(kinds[here]), mesh.dp)", "all_reduce of int32 [3]"),
        ("[comm.all_reduce, comm.all_gather][here](torch.ones(3), mesh.dp)", "all_gather"),
    ],
)
def test_checked_mode_shows_who_called_what(notebook, call, said):
    source = (
        "from course_lib import comm\n"
        "kinds = [torch.float32, torch.int32]\n"
        "def f():\n"
        "    mesh = make_mesh()\n"
        "    here = int(mesh.dp.rank == 2)\n"
        f"    return {call}\n"
        "run(f, checked=True, timeout=10)"
    )
    cell = notebook.cell(source)
    assert "raised ValueError: the ranks of axis dp do not agree" in cell.error.splitlines()[0]
    lines = [line.strip() for line in cell.error.splitlines()]
    at = f", cell {cell.number} line 6"
    for rank in (0, 1, 3):
        assert f"rank {rank}: all_reduce of float32 [3]{at}" in lines
    odd = next(line for line in lines if line.startswith("rank 2: "))
    assert odd.startswith(f"rank 2: {said}")
    assert odd.endswith(at)
    notebook.assert_usable()


def test_interrupt(notebook):
    source = (
        "def f():\n"
        "    dist.barrier()  # or a rank may be interrupted before its first line\n"
        "    if dist.get_rank():\n"
        "        dist.barrier()\n"
        "    time.sleep(1)\n"
        "    print('here', flush=True)\n"
        "    while True: pass\n"
        "run(f)"
    )
    cell = notebook.cell(source, interrupt_after="here")
    assert cell.error_name == "RankInterrupted"
    lines = lines_of_ranks(cell.error)
    assert lines[0].startswith(f"rank 0 was at: cell {cell.number} line 7")
    for rank in (1, 2, 3):
        assert lines[rank].startswith(f"rank {rank} was at: barrier, cell {cell.number} line 4")
    assert cell.seconds < 10
    notebook.assert_usable()


def test_a_result_that_cannot_be_pickled(notebook):
    source = (
        "import threading\n"
        "def f():\n    return {'loss': 1.0, 'locks': [threading.Lock()]}\n"
        "run(f, n=2)"
    )
    cell = notebook.cell(source)
    assert cell.error_name == "RankError"
    assert "the result['locks'][0] (a _thread.lock) cannot be pickled" in cell.error
    notebook.assert_usable()


def test_a_function_that_cannot_be_pickled(notebook):
    notebook.cell("import threading\nmy_lock = threading.Lock()")
    cell = notebook.cell("def f():\n    return my_lock\nrun(f, n=2)")
    assert cell.error_name == "TypeError"
    assert "function f cannot be sent to the ranks" in cell.error
    assert "the variable my_lock (a _thread.lock)" in cell.error
    assert "cloudpickle" not in cell.error  # its traceback says nothing more
    cell = notebook.cell("run(print, my_lock, n=2)")
    assert "argument 1 of print (a _thread.lock) cannot be sent" in cell.error
    notebook.assert_usable()


def test_a_flood_of_output_is_cut_and_said(notebook):
    source = (
        "def f():\n"
        "    for i in range(60_000):\n        print(i, 'x' * 50)\n"
        "    print('the end')\n"
        "results = run(f, n=2)\n"
        "[len(text) for text in results.outputs]"
    )
    cell = notebook.cell(source)
    assert cell.error == ""
    for rank in (0, 1):
        assert f"[rank {rank}] the end" in cell.text
        assert f"[rank {rank}] ... " in cell.text
    assert "bytes left out" in cell.text
    assert len(cell.text) < 4_000_000
    sizes = eval(cell.value)
    assert all(2**20 <= size < 2**20 + 100 for size in sizes)
    notebook.assert_usable()


def test_run_inside_a_rank(notebook):
    cell = notebook.cell("def f():\n    return run(print, n=2)\nrun(f, n=2)")
    assert cell.error_name == "RankError"
    assert "raised RuntimeError: this is a rank already" in cell.error
    assert f"cell {cell.number} line 2" in cell.error
    notebook.assert_usable()


def test_a_kept_world_starts_fresh_ranks_after_a_fault(notebook):
    notebook.cell("world = World(2, timeout=5)")
    first = notebook.cell("pids = world.run(os.getpid); pids == world.run(os.getpid)")
    assert first.value == "True"
    cell = notebook.cell("def f():\n    if dist.get_rank():\n        1 / 0\nworld.run(f)")
    assert "rank 1 raised ZeroDivisionError" in cell.error
    again = notebook.cell("new = world.run(os.getpid); len({*pids, *new})")
    assert again.value == "4"
    notebook.cell("world.close()")
    notebook.assert_usable()


def test_bad_arguments_are_one_sentence(notebook):
    for call, name, words in [
        ("run(print, n=0)", "ValueError", "expected 1 to"),
        ("run(print, n=2.0)", "TypeError", "whole number"),
        ("run(print, timeout=-1)", "ValueError", "above 0 seconds"),
        ("run(3)", "TypeError", "expected a function"),
        ("run(print, device='tpu')", "ValueError", "device='tpu'"),
    ]:
        cell = notebook.cell(call)
        assert cell.error_name == name
        assert words in cell.error.splitlines()[-1]
    notebook.assert_usable()
