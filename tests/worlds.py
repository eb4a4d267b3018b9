"""Worlds of 1 to 4 gloo ranks for the tests: four processes, started once and kept, and a process group for
each size.

def ranks(group, x):                       # a module-level function of a test file
    return x + dist.get_rank(group)

run_world(3, ranks, 10) == [10, 11, 12]    # one result per rank
"""

import atexit
import faulthandler
import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback

LARGEST = 4
# Replaces optim.SMALL: the parameters of tests are small, but some must be divided by rows
SMALL = 1023
# Forks of one process that has done the imports, which would take seconds in every run and world
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.preloaded"])
_workers = []  # (process, connection)


def run_world(size, function, *args):
    """Call function(group, *args) on `size` ranks at once and return their results.

    RuntimeError with the rank's traceback if one raises; TimeoutError, and fresh processes next time, if one
    hangs.
    """
    if not all(process.is_alive() for process, _ in _workers):
        _stop()  # a test of races ends every child of this process
    if not _workers:
        _start()
    connections = [connection for _, connection in _workers[:size]]
    for connection in connections:
        connection.send((size, function, args))
    answers = {}
    while len(answers) < size:
        pending = [connection for connection in connections if connection not in answers]
        ready = multiprocessing.connection.wait(pending, timeout=120)
        if not ready:
            for process, _ in _workers:
                os.kill(process.pid, signal.SIGUSR1)  # prints its traceback
            time.sleep(1)
            _stop()
            ranks = [connections.index(connection) for connection in pending]
            raise TimeoutError(f"ranks {ranks} of {size} did not answer")
        for connection in ready:
            rank = connections.index(connection)
            try:
                error, answers[connection] = connection.recv()
            except EOFError:
                _stop()
                raise RuntimeError(f"rank {rank} of {size} died") from None
            if error:
                _stop()  # the others may be waiting in a collective
                raise RuntimeError(f"rank {rank} of {size}:\n{error}")
    return [answers[connection] for connection in connections]


def _start():
    store = tempfile.mkdtemp(prefix="worlds-") + "/store"
    for rank in range(LARGEST):
        ours, theirs = FORKS.Pipe()
        process = FORKS.Process(target=_serve, args=(rank, theirs, store), daemon=True)
        process.start()
        theirs.close()
        _workers.append((process, ours))
    atexit.register(_stop)


def _stop():
    for process, connection in _workers:
        process.kill()
        process.join()
        connection.close()
    _workers.clear()


def run_fresh_world(size, folder, function, *args):
    """Call function(*args) on `size` new ranks and return their exit codes.

    Their world is the default process group, which PyTorch's utilities use, and they may be killed.
    """
    store, ranks = f"{folder}/store-{time.monotonic_ns()}", []
    for rank in range(size):
        ranks.append(FORKS.Process(target=_be_rank, args=(rank, size, store, function, args)))
        ranks[-1].start()
    for process in ranks:
        process.join(120)
        process.kill()
    return [process.exitcode for process in ranks]


def _be_rank(rank, size, store, function, args):
    os.environ["NANOMUON_COMPILE"] = "0"
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    function(*args)


def _serve(rank, connection, store):
    faulthandler.register(signal.SIGUSR1)
    os.environ["NANOMUON_COMPILE"] = "0"
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh

    from nanomuon import optim, parallel

    optim.SMALL = SMALL
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=LARGEST)
    groups = {size: dist.new_group(range(size)) for size in range(1, LARGEST + 1)}
    own_group = [dist.new_group([each]) for each in range(LARGEST)][rank]
    mesh_of_all = parallel.device_mesh

    # Process groups, including those of meshes, live as long as their process, and their threads wake up all
    # the time: a hundred groups take half a core
    @functools.cache
    def device_mesh(device_type, data_parallel, tensor_parallel):
        """A mesh of fewer processes uses existing groups, because all processes must create a new one."""
        shape = data_parallel, tensor_parallel
        if data_parallel * tensor_parallel == LARGEST:
            return mesh_of_all(device_type, *shape)
        of_dims = [groups[size] if size > 1 else own_group for size in shape]
        ranks = torch.arange(max(shape)).view(shape)
        return DeviceMesh.from_group(of_dims, device_type, mesh=ranks, mesh_dim_names=("dp", "tp"))

    parallel.device_mesh = device_mesh
    while True:
        try:
            size, function, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((None, function(groups[size], *args)))
        except BaseException:  # pytest.fail is not an Exception
            connection.send((traceback.format_exc(), None))
