"""The kernel's count of what ranks send: equal to formula and headers, by axis and by peer."""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.ledger import formula_matrices
from course_lib.mesh import RankContext, enter_rank, make_mesh, rank_context, sub_axis
from course_lib.trace import SentBytes, SocketMeter, header_bytes, traffic_matrices
from course_lib.trace.traffic import HEADER_BYTES, bytes_written, read_connections

DTYPES = {"float32": torch.float32, "float64": torch.float64, "int8": torch.int8}


@pytest.fixture(scope="module", autouse=True)
def counted(need):
    need(read_connections() is not None, "the kernel does not count what TCP sends")


def one_message(x, axis):
    if axis.rank == 0:
        comm.send(x, axis, to=axis.size - 1)
    if axis.rank == axis.size - 1:
        comm.recv(x, axis, source=0)


def uneven(x, axis):
    """Rank 0 sends everything to itself and the others send all to rank 0."""
    mine = [len(x)] + [0] * (axis.size - 1)
    received = [len(x)] * axis.size if axis.rank == 0 else [0] * axis.size
    comm.all_to_all_v(x, axis, mine, received)


OPERATIONS = {
    "all_reduce": comm.all_reduce,
    "all_gather": comm.all_gather,
    "reduce_scatter": comm.reduce_scatter,
    "all_to_all": comm.all_to_all,
    "all_to_all, uneven": uneven,
    "broadcast": lambda x, axis: comm.broadcast(x, axis, source=axis.size - 1),
    "send and recv": one_message,
    "exchange": lambda x, axis: comm.exchange(x, axis, axis.next, axis.previous),
    "ring of messages": comm.ring_all_reduce,
    "barrier": lambda x, axis: comm.barrier(axis),
}


def every_operation(rows, dtype):
    """Each operation's count on this rank, its formula and its headers, in bytes."""
    mesh, found = make_mesh(), {}
    for name, operation in OPERATIONS.items():
        for count in rows:
            x = torch.zeros(count * mesh.dp.size, dtype=DTYPES[dtype])
            mesh.ledger.clear()
            with mesh.kernel_bytes() as sent:
                operation(x, mesh.dp)
            formula = sum(record.wire for record in mesh.ledger.records)
            headers = sum(header_bytes(record) for record in mesh.ledger.records)
            found[name, count] = sent, formula, headers
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_every_operation_sends_its_formula_and_gloos_headers_to_the_byte(worlds, n, dtype):
    results = worlds(n).run(every_operation, (1, 3, 1000, 2**16), dtype)
    for case in results[0]:
        sent, formula, headers = zip(*(rank[case] for rank in results), strict=True)
        kernel = sum(map(sum, traffic_matrices(sent)["dp"]))
        assert kernel == sum(formula) + sum(headers), case
        assert kernel == sum(one.by_axis["dp"] for one in sent), "every byte has a receiver"
        if case[1] == 2**16 and case[0] != "barrier":
            assert sum(headers) < 0.01 * sum(formula)


@pytest.mark.parametrize("n", [2, 4])
def test_a_large_all_reduce_has_a_message_for_each_segment_of_a_mebibyte(worlds, n):
    def add():
        comm.all_reduce(torch.zeros(3 * 2**20 + 5), make_mesh().dp)

    results = worlds(n).run(add)
    kernel = sum(map(sum, results.kernel_bytes["dp"]))
    (record,) = results.ledgers[0].records
    assert kernel == n * (record.wire + header_bytes(record))
    segments = -(-record.payload // (n * 2**20)) * n
    assert header_bytes(record) * n == HEADER_BYTES * 2 * (n - 1) * segments > HEADER_BYTES * 16


def test_a_collective_that_moves_twice_the_bytes_is_seen(worlds):
    """gloo's own reduce-scatter is an all-reduce inside; comm's is an all-to-all."""

    def scatter(own):
        mesh = make_mesh()
        axis, x = mesh.dp, torch.zeros(2**18)
        native = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        mesh.count_from_here()
        if own:
            native(x.new_empty(len(x) // axis.size), x, group=axis.group)
        else:
            comm.reduce_scatter(x, axis)

    formula = 3 * 2**20  # 4 ranks send 3/4 of 1 MiB
    ours, gloos = (worlds(4).run(scatter, own).kernel_bytes["dp"] for own in (False, True))
    assert 0 < sum(map(sum, ours)) - formula <= 12 * HEADER_BYTES
    assert 0 < sum(map(sum, gloos)) - 2 * formula <= 48 * HEADER_BYTES


def on_one_axis(axis_name):
    mesh = make_mesh(tp=2)
    comm.all_reduce(torch.zeros(50_000), getattr(mesh, axis_name))


@pytest.mark.parametrize(
    ("axis", "pairs"), [("tp", {(0, 1), (2, 3)}), ("dp", {(0, 2), (1, 3)}), ("world", None)]
)
def test_axes_are_told_apart_and_so_are_peers(worlds, axis, pairs):
    by_axis = worlds(4).run(on_one_axis, axis).kernel_bytes
    assert set(by_axis) == {"tp", "dp", "world"}
    for name, matrix in by_axis.items():
        sent = {(i, j) for i, row in enumerate(matrix) for j, size in enumerate(row) if size}
        if name != axis:
            assert not sent, f"traffic of {axis} on {name}"
        elif pairs:
            assert sent == pairs | {(j, i) for i, j in pairs}
            sizes = {matrix[i][j] for i, j in sent}
            assert len(sizes) == 1, "two ranks that add send each other the same"
            assert 200_000 < sizes.pop() < 200_000 + 8 * HEADER_BYTES
        else:
            assert sent == {(i, j) for i in range(4) for j in ((i + 1) % 4, (i - 1) % 4)}, "a ring"


def test_an_all_to_all_is_the_same_for_each_pair(worlds):
    def swap():
        comm.all_to_all(torch.zeros(4000), make_mesh().dp)

    matrix = worlds(4).run(swap).kernel_bytes["dp"]
    assert matrix == [[0 if i == j else 4000 + HEADER_BYTES for j in range(4)] for i in range(4)]


def test_axes_made_of_an_axis_have_counts_of_their_own(worlds):
    def halves():
        mesh = make_mesh()
        half = sub_axis(mesh.dp, 2, "half")
        comm.all_reduce(torch.zeros(1000), half)

    by_axis = worlds(4).run(halves).kernel_bytes
    assert by_axis["dp"] == [[0] * 4] * 4
    assert {
        (i, j) for i, row in enumerate(by_axis["half"]) for j, size in enumerate(row) if size
    } == {(0, 1), (1, 0), (2, 3), (3, 2)}


def test_raw_torch_on_the_default_group_is_on_world(worlds):
    def raw():
        dist.all_reduce(torch.zeros(1000))

    results = worlds(2).run(raw)
    assert list(results.kernel_bytes) == ["world"]
    assert sum(map(sum, results.kernel_bytes["world"])) == 8000 + 8 * HEADER_BYTES


def test_kept_ranks_count_each_run_from_zero(worlds):
    first, second = (worlds(4).run(on_one_axis, "dp").kernel_bytes for _ in range(2))
    assert first == second


def test_count_from_here_forgets_ledger_and_count_together(worlds):
    def twice():
        mesh = make_mesh()
        comm.all_reduce(torch.zeros(100_000), mesh.dp)
        mesh.count_from_here()
        comm.all_gather(torch.zeros(10), mesh.dp)

    results = worlds(2).run(twice)
    formula = formula_matrices(results.ledgers)["dp"]
    assert formula == [[0, 40], [40, 0]]
    assert results.kernel_bytes["dp"] == [[0, 40 + 2 * HEADER_BYTES], [40 + 2 * HEADER_BYTES, 0]]


def test_groups_that_the_function_destroyed_leave_no_count_and_no_error(worlds):
    def destroys():
        mesh = make_mesh(tp=2)
        comm.all_reduce(torch.zeros(10), mesh.tp)
        dist.destroy_process_group(mesh.tp.group)
        return mesh.tp.size

    results = worlds(4).run(destroys)
    assert list(results) == [2] * 4
    assert results.kernel_bytes is None


def test_ranks_that_initialise_themselves_are_counted_until_they_destroy_the_group():
    from course_lib.launch import run

    def raw(destroy):
        dist.init_process_group("gloo")
        dist.all_reduce(torch.zeros(100_000))
        if destroy:
            dist.destroy_process_group()

    kept = run(raw, False, n=2, init=False).kernel_bytes
    assert 800_000 < sum(map(sum, kept["world"])) < 820_000, "the store's bytes are in it"
    assert [kept["world"][rank][rank] for rank in (0, 1)] == [0, 0]
    assert run(raw, True, n=2, init=False).kernel_bytes is None


def test_a_single_rank_sends_nothing_and_says_so(worlds):
    assert worlds(1).run(lambda: len(make_mesh().sizes)).kernel_bytes == {}


def test_the_formula_gives_a_matrix_where_the_kernel_has_none(worlds):
    def mixed():
        mesh = make_mesh(tp=2)
        comm.all_reduce(torch.zeros(100), mesh.tp)
        comm.all_to_all(torch.zeros(100), mesh.world)
        if mesh.dp.rank == 0:
            comm.send(torch.zeros(7), mesh.dp, to=1)
        else:
            comm.recv(torch.zeros(7), mesh.dp, source=0)

    formula = formula_matrices(worlds(4).run(mixed).ledgers)
    assert formula["tp"] == [[0, 400, 0, 0], [400, 0, 0, 0], [0, 0, 0, 400], [0, 0, 400, 0]]
    assert formula["world"] == [[0 if i == j else 100 for j in range(4)] for i in range(4)]
    assert formula["dp"] == [[0, 0, 28, 0], [0, 0, 0, 28], [0] * 4, [0] * 4]


# --- where the kernel does not say ---------------------------------------------------------------

CONNECTION = ("10.0.0.1", 1), ("10.0.0.2", 2)


def test_a_short_tcp_info_has_no_count():
    assert bytes_written(bytes(192)) is None, "as Linux 4.15 gives it"
    info = bytearray(256)
    info[200:208] = (1000).to_bytes(8, "little")
    info[208:216] = (30).to_bytes(8, "little")
    info[144:148] = (5).to_bytes(4, "little")
    assert bytes_written(bytes(info)) == 1000 - 30 + 5


def test_without_proc_or_tcp_info_there_is_no_count(tmp_path, monkeypatch):
    assert read_connections(tmp_path / "no proc") is None
    with monkeypatch.context() as patched:
        patched.delattr(socket, "TCP_INFO")
        assert read_connections() is None


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_meter_that_cannot_read_returns_none_and_never_raises(on_cpu):
    meter = SocketMeter(4, on_cpu=on_cpu, read=(lambda: None) if on_cpu else read_connections)
    meter.ignore_open()
    meter.restart()
    with meter.opening("tp", size=2), meter.inside() as sent:
        pass
    assert sent.by_axis is meter.sent().by_axis is None
    assert traffic_matrices([SentBytes({}), meter.sent()]) is None


def test_a_reading_that_failed_at_the_start_is_not_taken_for_zero():
    readings = iter([None, {CONNECTION: 90}, None, {CONNECTION: 95}, {CONNECTION: 97}])
    meter = SocketMeter(2, read=lambda: next(readings))
    meter.restart()
    assert meter.sent().by_axis is None
    with meter.inside() as sent:
        pass
    assert sent.by_axis is None
    assert meter.sent().by_axis is None, "until it is started anew"


def test_an_end_that_no_rank_has_leaves_no_matrix():
    alone = SentBytes({("tp", CONNECTION): 5})
    assert traffic_matrices([alone, SentBytes({})]) is None
    store = SentBytes({("world", CONNECTION): 5})
    assert traffic_matrices([store, SentBytes({})]) == {}
    both = [alone, SentBytes({("tp", CONNECTION[::-1]): 7})]
    assert traffic_matrices(both) == {"tp": [[0, 5], [7, 0]]}


def test_no_descriptor_left_is_no_count():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    one, other = socket.socketpair()
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        assert read_connections() is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        one.close()
        other.close()
    assert read_connections() is not None


def test_an_axis_without_connections_leaves_no_count():
    """As with nccl, or groups of gloo that connect at first use: a sum would lack that axis."""
    meter = SocketMeter(2, read=lambda: {CONNECTION: 10})
    assert meter.sent().by_axis == {"world": 10}
    with meter.opening("tp", size=1):
        pass
    assert meter.sent().by_axis == {"world": 10}
    with meter.opening("tp", size=2):
        pass
    assert meter.sent().by_axis is None


def test_a_connection_that_closed_leaves_no_count():
    open_now = {CONNECTION: 10}
    meter = SocketMeter(2, read=lambda: dict(open_now))
    with meter.opening("tp", size=2):
        open_now[("a", 3), ("b", 4)] = 8
    open_now[("a", 3), ("b", 4)] += 100
    assert meter.sent().by_axis == {"world": 10, "tp": 100}, "8 bytes were there when it opened"
    del open_now[("a", 3), ("b", 4)]
    assert meter.sent().by_axis is None


def test_other_sockets_and_files_are_no_connections():
    """Listening, UNIX and datagram sockets, pipes, files, and one that is closed meanwhile."""
    before = read_connections()
    listening = socket.create_server(("127.0.0.1", 0))
    one, other = socket.socketpair()
    datagram = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    pipe = os.pipe()
    assert read_connections() == before
    open_files = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        read_connections()
    assert len(os.listdir("/proc/self/fd")) == open_files, "every copy of a descriptor is closed"
    for each in (listening, one, other, datagram):
        each.close()
    for fd in pipe:
        os.close(fd)


def test_both_ends_in_one_process_name_each_other_also_by_ipv6():
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        near = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
        far, _ = server.accept()
        with near, far:
            near.sendall(bytes(1000))
            found = read_connections()
            ends = near.getsockname()[:2], near.getpeername()[:2]
            assert found[ends] == 1000
            assert found[ends[::-1]] == 0


def test_bytes_that_wait_in_the_send_buffer_are_counted():
    """The peer does not read: part of the message is sent and part waits."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            near.setblocking(False)
            written = 0
            try:
                while True:
                    written += near.send(bytes(2**16))
            except BlockingIOError:
                pass
            assert read_connections()[near.getsockname(), near.getpeername()] == written


def test_reading_while_descriptors_come_and_go_never_raises():
    done = threading.Event()

    def churn():
        while not done.is_set():
            with socket.socket(), open(os.devnull):
                pass

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        counts = Counter(read_connections() is None for _ in range(300))
    finally:
        done.set()
        thread.join()
    assert counts == {False: 300}


# --- what it costs -------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "sizes"), [(4, {"tp": 2}), (16, {"tp": 2, "cp": 2, "pp": 2})])
def test_a_read_is_cheap(worlds, n, sizes):
    """CPU time: 0.1 ms with 5 connections, 0.3 ms with 22; the bound allows for a busy machine."""

    def read():
        make_mesh(**sizes)
        context, took = rank_context(), []
        for _ in range(50):
            start = time.process_time()
            context.sockets.sent()
            took.append(time.process_time() - start)
        return statistics.median(took), len(read_connections())

    times, connections = zip(*worlds(n).run(read), strict=True)
    print(f"{n} ranks: {connections[0]} connections, {1e3 * statistics.median(times):.3f} ms")
    assert statistics.median(times) < 5e-3


def test_a_process_that_no_launcher_started_counts_from_its_beginning():
    enter_rank(RankContext())
    try:
        with make_mesh().kernel_bytes() as sent:
            pass
        assert set(sent.by_axis) <= {"world"}
    finally:
        enter_rank(RankContext())
