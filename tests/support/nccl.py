"""What `collectives.runtime.nccl.connect` gives, made of MPI messages between emulated GPUs."""

from mpi4py import MPI

OPERATIONS = {"max": MPI.MAX, "sum": MPI.SUM}


class NcclOverMpi:
    """A `Communicator` whose groups are queued to an `EmulatorRuntime`, which runs or records them."""

    def __init__(self, comm, runtime):
        self.rank, self.size = comm.rank, comm.size
        self._comm, self._runtime = comm.unwatched.Dup(), runtime  # a thread of its own ends it
        self.ended = None

    def exchange(self, receives, sends):
        ways = (self._comm.Irecv, receives), (self._comm.Isend, sends)
        posts = [(start, self._runtime.inside(array), peer) for start, of in ways for array, peer in of]
        self._runtime.queue(lambda: MPI.Request.Waitall([start(array, peer) for start, array, peer in posts]))

    def all_reduce(self, array, operation):
        inside = self._runtime.inside(array)
        self._runtime.queue(lambda: self._comm.Allreduce(MPI.IN_PLACE, inside, OPERATIONS[operation]))

    def check(self):
        """MPI ends the job where something breaks."""

    def close(self):
        assert self._runtime.waited, "messages may still be under way"
        self._comm.Free()
        self.ended = "closed"

    def abort(self):
        self.ended = "aborted"
