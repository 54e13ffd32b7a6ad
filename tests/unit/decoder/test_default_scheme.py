"""What ranks take where no scheme is named."""

from types import SimpleNamespace

import pytest

from treeattn.decoder.reducers import selected
from treeattn.decoder.request import Reduction

ONE_NODE, TWO_NODES = ((0, 1, 2),), ((0, 1), (2,))


@pytest.mark.parametrize(
    ("nodes", "device", "scheme"),
    [
        (ONE_NODE, "cpu", "recursive_doubling"),
        (ONE_NODE, "cuda", "all_gather_merge"),
        (TWO_NODES, "cpu", "hierarchical"),
        (TWO_NODES, "cuda", "hierarchical"),
    ],
)
def test_the_nodes_and_the_device_decide(nodes, device, scheme):
    comm = SimpleNamespace(nodes=nodes)
    assert selected(Reduction(), comm, device).text == scheme
    assert selected(Reduction("chain"), comm, device).text == "chain"
