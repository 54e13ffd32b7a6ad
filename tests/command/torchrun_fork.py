"""A process that a rank of torchrun forks, for test_limits.py."""

import torch.distributed as dist

from tests.support import forked
from tests.support.torchrun import without_mpi
from treeattn.mpi import communicators

dist.init_process_group("gloo")
forked.before_any_call()
forked.check(communicators.intracomm(dist.new_group()), dist.group.WORLD)
without_mpi()
dist.destroy_process_group()
